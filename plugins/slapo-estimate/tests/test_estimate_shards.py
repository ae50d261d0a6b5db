"""Parameters sharded over replicas: estimates against two or four real processes under fully_shard."""

from __future__ import annotations

import gc
import math
import re
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import slapo_core as slapo
from slapo_estimate.device import DeviceSpec, Link
from slapo_estimate.private import FakeTensor
from slapo_runtime.launcher import run_ranks
from slapo_runtime.private import ranks_of_group
from tests.messages import Messages

from .models import adam

WIDTH = 128
BLOCK = (2 * 4 * WIDTH * WIDTH + 7 * WIDTH) * 4  # bytes
ROOT = 2 * (WIDTH * WIDTH + WIDTH) * 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.into, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if tied:
            self.head.weight = self.into.weight
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output


def batch() -> torch.Tensor:
    return torch.ones(64, WIDTH)


def marked(sch: Any) -> None:
    """Units of other sizes, some of which stay gathered, and recomputation in others."""
    sch["blocks.0"].fully_shard(reshard_after_forward=False)
    sch["blocks.*.down"].fully_shard()
    sch["blocks.2"].checkpoint()


def split(sch: Any) -> None:
    sch["blocks.*.up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    sch["blocks.*.down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def cut(sch: Any) -> None:
    sch["blocks.1"].pipeline_split()


def cut_and_marked(sch: Any) -> None:
    """Units within blocks, and recomputation, before and after the cut."""
    sch["blocks.*.down"].fully_shard()
    sch["blocks.*.norm"].fully_shard()
    sch["blocks.2"].checkpoint()
    sch["blocks.0"].pipeline_split()


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "default": (None, {"data_parallel": "fsdp"}),
    "marked": (marked, {"accumulate": 2, "max_grad_norm": 1.0}),
    "mixed": (None, {"data_parallel": "fsdp", "precision": "bf16-mixed", "fp32": ("*.norm",)}),
    "kept": (None, {"data_parallel": "fsdp", "reshard_after_forward": False}),
    "checkpointed": (lambda sch: sch["blocks.*"].checkpoint(), {"data_parallel": "fsdp", "accumulate": 4}),
    "split": (split, {"data_parallel": "fsdp"}),
    "autocast": (None, {"precision": "bf16-mixed"}),
    "lower": (None, {"precision": "bf16", "accumulate": 2, "data_parallel": "fsdp"}),
    "scaled": (None, {"precision": "fp16-mixed", "data_parallel": "fsdp"}),
    "stages": (cut, {"data_parallel": "fsdp", "max_grad_norm": 1.0}),
    "stages-tied": (cut, {"data_parallel": "fsdp", "microbatches": 4}),
    "stages-marked": (cut_and_marked, {"microbatches": 4, "pipeline_schedule": "gpipe"}),
    "stages-mixed": (cut, {"data_parallel": "fsdp", "precision": "bf16-mixed", "fp32": ("*.norm",)}),
    "stages-lower": (cut, {"precision": "bf16"}),
}


def schedule(mesh: dict[str, int], name: str) -> slapo.Schedule:
    torch.manual_seed(0)
    sch = slapo.create_schedule(Blocks(tied="tied" in name), mesh=mesh, example_inputs=batch())
    if CASES[name][0] is not None:
        CASES[name][0](sch)
    return sch


MESSAGES = {  # operator: kind, and the position of the tensor that a rank gives
    "c10d::_allgather_base_": ("all_gather", 1),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::allreduce_": ("all_reduce", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
}


def ranks_of(func: Any, args: Any) -> list[int]:
    names = [argument.name for argument in func._schema.arguments]
    return ranks_of_group(args[next(names.index(each) for each in ("process_group", "group_name") if each in names)])


class Watched(TorchDispatchMode):
    """Count the bytes of storages that operators returned, until nothing holds them, and list messages.

    Args:
        apart: ranks whose messages are left out.
    """

    def __init__(self, apart: frozenset[int]) -> None:
        super().__init__()
        self.apart = apart
        self.storages: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
        self.peak = 0
        self.messages: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        kind, given = MESSAGES.get(func._schema.name, ("", 0))
        if kind and frozenset(ranks_of(func, args)) != self.apart:
            size = sum(leaf.nbytes for leaf in tree_leaves(args[given]) if isinstance(leaf, torch.Tensor))
            self.messages.append((kind, size))
        if func is torch.ops.aten.split.Tensor:  # allocates nothing; gloo splits a copy of its own
            return result
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta and not isinstance(leaf, FakeTensor):
                self.storages[id(leaf.untyped_storage())] = leaf.untyped_storage()
        now = [each() for each in self.storages.valuerefs()]
        self.peak = max(self.peak, sum(each.nbytes() for each in now if each is not None))  # some were resized
        return result


def pipeline_ranks(mesh: dict[str, int]) -> frozenset[int]:
    """The ranks along ``pp``, which is the last dimension, of this process; none without a pipeline."""
    first = dist.get_rank() // mesh.get("pp", 1) * mesh.get("pp", 1)
    return frozenset(range(first, first + mesh["pp"])) if "pp" in mesh else frozenset()


def trained(mesh: dict[str, int], names: list[str]) -> dict[str, tuple[int, list[tuple[str, int]], str]]:
    """By case: bytes at the peak of three steps, messages of the third one, and the plan."""
    found = {}
    stages = pipeline_ranks(mesh)
    for name in names:
        with Watched(stages) as watched:
            sch = schedule(mesh, name)
            engine = slapo.build(sch, target="torch", optimizer=adam, loss=loss, **CASES[name][1])
            gc.collect()  # the build
            watched.peak = 0
            for _ in range(3):
                watched.messages.clear()
                engine.train_step(batch())
        found[name] = (watched.peak, watched.messages, "\n".join(engine.plan.steps))
        engine.close()
    return found


def check(mesh: dict[str, int], names: list[str]) -> None:
    real = run_ranks(trained, mesh, names, world_size=math.prod(mesh.values()))
    for name in names:
        options = CASES[name][1]
        estimate = slapo.estimate(schedule(mesh, name), batch(), optimizer=adam, loss=loss, **options)
        assert len(estimate.kinds) == mesh.get("pp", 1)
        for kind in estimate.kinds:
            peak, messages, plan = real[kind.rank][name]
            assert abs(kind.memory.total - peak) < 0.02 * peak, (name, kind.rank, kind.memory, peak)
            found = [each for each in kind.collectives if each.mesh_dim != "pp"]
            assert [(each.kind, each.bytes) for each in found] == messages, name
        if "pp" in mesh:
            continue
        gathers, reductions = map(int, re.findall(r"(?:gathers|gradients) (\d+) times", plan) or (0, 0))
        found = Counter((each.kind, each.mesh_dim, each.ranks) for each in kind.collectives)
        assert found["all_gather", "dp", 2] == options.get("accumulate", 1) * gathers, name
        assert found["reduce_scatter", "dp", 2] == reductions, name
        assert found["all_reduce", "dp_replicate", 2] == (reductions if "dp_replicate" in mesh else 0), name


@pytest.mark.ranks
def test_steps_equal_those_of_two_processes() -> None:
    check({"dp": 2}, ["marked", "mixed"])


@pytest.mark.ranks
@pytest.mark.breadth
def test_steps_of_stages_equal_those_of_four_processes() -> None:
    check({"dp": 2, "pp": 2}, ["stages", "stages-tied"])


@pytest.mark.ranks
@pytest.mark.breadth
@pytest.mark.parametrize(
    ("mesh", "names"),
    [
        ({"dp": 2}, ["default", "kept", "checkpointed", "autocast", "lower", "scaled"]),
        ({"dp_replicate": 2, "dp": 2}, ["default", "marked"]),
        ({"dp": 2, "tp": 2}, ["split"]),
        ({"dp": 2, "pp": 2}, ["stages-marked"]),
        ({"pp": 2}, ["stages-mixed", "stages-lower"]),
    ],
    ids=lambda each: "-".join(each),
)
def test_further_steps_equal_those_of_processes(mesh: dict[str, int], names: list[str]) -> None:
    check(mesh, names)


def estimated(mesh: dict[str, int] | None = None, **options: Any) -> slapo.RankEstimate:
    sch = schedule(mesh or {"dp": 2}, "default")
    options = {"data_parallel": "fsdp", **options}
    [kind] = slapo.estimate(sch, batch(), optimizer=adam, loss=loss, **options).kinds
    return kind


@pytest.mark.ranks
def test_kinds_of_memory_and_overlapping_messages() -> None:
    """Where a message takes a second, and so does a product of the root: a block has eight in the forward."""
    flops = {"float32": 2.0 * len(batch()) * WIDTH * WIDTH}
    device = DeviceSpec("d", flops, bandwidth=1e30, launch=0.0, links={"dp": Link(1e30, 1.0)})
    found, shard = estimated(device=device), (4 * BLOCK + ROOT) // 2
    # At the peak, the first block that the backward needs: its parameters, and those of the root.
    assert found.memory.parameters == shard + BLOCK + ROOT
    assert found.memory.gradients == shard
    assert found.memory.optimizer == pytest.approx(2 * shard, abs=1000)  # and the counts of steps
    assert [(each.kind, each.phase, each.bytes) for each in found.collectives] == [
        ("all_gather", "forward", ROOT // 2),
        *4 * [("all_gather", "forward", BLOCK // 2)],
        ("all_gather", "backward", BLOCK // 2),
        *3 * [("all_gather", "backward", BLOCK // 2), ("reduce_scatter", "backward", BLOCK)],
        ("reduce_scatter", "backward", BLOCK),
        ("reduce_scatter", "backward", ROOT),
    ]
    # Nothing overlaps the first two gathers but the root's product, and nothing the last reduction.
    assert found.time == pytest.approx(1 + (1 + 4 * 8 + 1) + (2 + 4 * 16 + 1) + 1)
    kept = estimated({"dp": 4}, reshard_after_forward=False).memory
    assert kept.parameters == shard // 2 + 4 * BLOCK + ROOT


@pytest.mark.ranks
def test_offloaded_units_are_told(message: Messages) -> None:
    sch = slapo.create_schedule(Blocks(), mesh={"dp": 2})
    sch["blocks.*"].fully_shard(offload=True)
    found = slapo.estimate(sch, batch(), optimizer=adam, loss=loss)
    [told] = [each for each in found.assumptions if "offload" in each]
    message(told, "counts, too")


@pytest.mark.ranks
@pytest.mark.breadth
def test_fit_checkpoints_what_shards_leave_room_for() -> None:
    sch = slapo.create_schedule(Blocks(), mesh={"dp": 2})
    many, options = torch.ones(2048, WIDTH), {"optimizer": adam, "loss": loss, "data_parallel": "fsdp"}
    before = slapo.estimate(sch, many, **options).memory.total
    found = slapo.fit(sch, before * 7 // 10, many, **options)
    assert found.before.memory.total == before
    assert found.paths == ("blocks.0", "blocks.1", "blocks.2")
    assert slapo.estimate(sch, many, **options).memory.total == found.peak <= before * 7 // 10


@pytest.mark.ranks
def test_pipelines_with_a_scaler_are_refused(message: Messages) -> None:
    sch = slapo.create_schedule(Blocks(), mesh={"dp": 2, "pp": 2}, example_inputs=batch())
    sch["blocks.1"].pipeline_split()
    with pytest.raises(slapo.EstimateError) as caught:
        slapo.estimate(sch, batch(), optimizer=adam, loss=loss, data_parallel="fsdp", precision="fp16-mixed")
    message(caught, "is not known")
