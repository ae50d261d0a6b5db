"""What data parallelism plans and refuses on meshes without processes, and what `fully_shard` marks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_runtime.planning import plan_of
from slapo_torch.dialect import TorchDialect
from slapo_torch.fully_shard import units_of

MESH = {"dp": 2, "tp": 2}


class Block(nn.Module):
    def __init__(self, features: int = 6) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(features), nn.Linear(features, 8), nn.Linear(8, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(6, 6), nn.ModuleList(Block() for _ in range(3)), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Tied(Stack):
    """The first and the last block share a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


class Experts(nn.Module):
    """Containers within the elements of a container."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
        self.pairs = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2), nn.GELU()]) for _ in range(2))
        self.mixed = nn.Sequential(nn.Linear(2, 2), nn.GELU())


def plan(model: nn.Module | slapo.Schedule, mesh: Any = MESH, **options: Any) -> slapo.Plan:
    sch = model if isinstance(model, slapo.Schedule) else slapo.create_schedule(model, mesh=mesh)
    return plan_of(TorchDialect(), sch, options)


def test_plan_names_units_and_counts_collectives() -> None:
    made = plan(Stack(), {"dp": 2}, data_parallel="fsdp")
    assert made.steps[1:] == (
        "fully_shard over mesh_dim 'dp' (2 ranks): blocks.0, blocks.1, ... blocks.2 (3 units), and the root's unit",
        "a micro-batch gathers 7 times over 'dp'; a step reduces gradients 4 times",
    )
    own = {"batch_axes": {}, "data_parallel": "fsdp", "reshard_after_forward": None}
    assert made.config == {**own, "precision": None, "fp32": ()}
    kept = plan(Stack(), {"dp_replicate": 2, "dp": 2}, reshard_after_forward=False)
    assert kept.config["data_parallel"] == "fsdp"
    assert kept.steps[1].startswith("fully_shard over mesh_dim 'dp' (2 ranks), replicated over 'dp_replicate' (2): ")
    assert kept.steps[2] == (
        "a micro-batch gathers 4 times over 'dp'; a step reduces gradients 4 times, each followed by an all-reduce "
        "over 'dp_replicate'"
    )


def test_plan_given_its_own_options_is_the_same() -> None:
    for options in ({"data_parallel": "fsdp"}, {"data_parallel": "ddp", "static_graph": True}, {}):
        made = plan(Stack(), **options)
        assert plan(Stack(), **made.config) == made


def test_tied_blocks_are_in_the_unit_of_the_root() -> None:
    made = plan(Tied(), data_parallel="fsdp")
    assert "'blocks.0' is in the root's unit: its parameter 'blocks.0.up.weight' is 'blocks.2.up.weight', too" in (
        made.steps
    )
    assert list(units_of(slapo.create_schedule(Tied()))) == ["blocks.1"]


def test_default_units_are_the_outermost_repeated_blocks() -> None:
    assert list(units_of(slapo.create_schedule(Experts()))) == ["layers.0", "layers.1"]
    assert list(units_of(slapo.create_schedule(nn.Sequential(Block(), Block())))) == ["0", "1"]


def test_marks_are_recorded_saved_replayed_and_undone() -> None:
    sch = slapo.create_schedule(Stack(), mesh=MESH)
    sch["blocks.*"].fully_shard(reshard_after_forward=2)
    sch["last"].fully_shard(offload=True)
    again = slapo.replay(Stack(), sch.to_json(), mesh=MESH)
    found = units_of(again)
    assert list(found) == ["blocks.0", "blocks.1", "blocks.2", "last"]
    assert (found["blocks.1"].reshard_after_forward, found["last"].offload) == (2, True)
    assert plan(again).config["data_parallel"] == "fsdp"
    again.undo(to=0)
    assert plan(again).config["data_parallel"] == "ddp"
    assert all(type(module) is not object and not module._forward_hooks for module in again.model.modules())


def test_mark_survives_a_replaced_module() -> None:
    sch = slapo.create_schedule(Stack(), mesh=MESH)
    sch["last"].fully_shard()
    sch["last"].replace(nn.Linear(6, 4))
    assert list(units_of(sch)) == ["last"]


@pytest.mark.parametrize(
    ("model", "path", "options", "words"),
    [
        (Stack, "blocks", {}, "ModuleList has no forward"),
        (Tied, "blocks.0", {}, "'blocks.0.up.weight' is 'blocks.2.up.weight', too, outside of the module"),
        (lambda: nn.Sequential(nn.GELU()), "0", {}, "the module has no parameters"),
        (Stack, "last", {"reshard_after_forward": 1}, "from 2 (got 1)"),
    ],
)
def test_invalid_marks_are_refused(model: Any, path: str, options: Any, words: str) -> None:
    sch = slapo.create_schedule(model(), mesh=MESH)
    with pytest.raises(slapo.PreconditionError) as caught:
        sch[path].fully_shard(**options)
    assert words in str(caught.value)


def test_second_mark_is_refused() -> None:
    sch = slapo.create_schedule(Stack(), mesh=MESH)
    sch["last"].fully_shard()
    with pytest.raises(slapo.PreconditionError, match="is a unit already"):
        sch["last"].fully_shard()


def scalar() -> nn.Module:
    model = Stack()
    model.scale = nn.Parameter(torch.ones(()))
    return model


def not_contiguous() -> nn.Module:
    model = Stack()
    model.first.weight = nn.Parameter(torch.randn(6, 6).t())
    return model


def hooked() -> nn.Module:
    model = Stack()
    model.first.weight.register_hook(lambda gradient: gradient)
    return model


def mixed() -> nn.Module:
    model = Stack()
    model.blocks[1].norm.double()
    return model


@pytest.mark.parametrize(
    ("model", "mesh", "options", "words"),
    [
        (scalar, MESH, {"data_parallel": "fsdp"}, "'scale' is a scalar"),
        (not_contiguous, MESH, {"data_parallel": "fsdp"}, "'first.weight' is not contiguous"),
        (hooked, MESH, {"data_parallel": "fsdp"}, "'first.weight' has gradient hooks"),
        (mixed, MESH, {"data_parallel": "fsdp"}, "unit 'blocks.1' has 'blocks.1.norm.weight' in float64"),
        (Stack, MESH, {"data_parallel": "zero"}, "must be 'ddp' or 'fsdp' (got 'zero')"),
        (Stack, MESH, {"data_parallel": "fsdp", "reshard_after_forward": "no"}, "(got 'no')"),
        (Stack, MESH, {"reshard_after_forward": True}, "is for data_parallel='fsdp' (got 'ddp')"),
        (Stack, MESH, {"data_parallel": "fsdp", "static_graph": True}, "'static_graph' is DistributedDataParallel's"),
        (Stack, {"dp_replicate": 2, "dp": 2}, {"data_parallel": "ddp"}, "several ranks along 'dp_replicate'"),
        (Stack, {"dp_replicate": 2, "tp": 2}, {}, "one along 'dp'"),
        (Stack, {"dp": 2, "dp_replicate": 2}, {}, "'dp_replicate' inside of 'dp'"),
    ],
)
def test_unsupported_models_options_and_meshes_are_refused(model: Any, mesh: Any, options: Any, words: str) -> None:
    with pytest.raises(slapo.BuildError) as caught:
        plan(model(), mesh, **options)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("target", "option"),
    [("deepspeed", 'zero_optimization={"stage": 3}'), ("megatron", "use_distributed_optimizer=True")],
)
def test_other_targets_refuse_marks_and_name_their_option(target: str, option: str) -> None:
    pytest.importorskip(f"slapo_{target}")
    sch = slapo.create_schedule(Stack())
    sch["blocks.*"].fully_shard()
    with pytest.raises(slapo.BuildError) as caught:
        slapo.build(sch, target=target)
    assert "#1 fully_shard() at 'blocks.0' is for target 'torch'" in str(caught.value)
    assert f"build({option})" in str(caught.value)


def test_fully_shard_needs_a_schedule_and_replicas() -> None:
    with pytest.raises(slapo.ArgumentError, match="takes the schedule"):
        slapo.fully_shard(Stack())  # type: ignore[arg-type]
    for mesh in (None, {"tp": 2}):
        with pytest.raises(slapo.MeshError, match="several ranks along 'dp'"):
            slapo.fully_shard(slapo.create_schedule(Stack(), mesh=mesh))
    with pytest.raises(slapo.MeshError, match="abstract"):
        slapo.fully_shard(slapo.create_schedule(Stack(), mesh={"dp": 2}))
