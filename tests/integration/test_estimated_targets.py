"""Estimates of the steps of DeepSpeed and Megatron, by their own engines without memory, against real processes."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import GPT2Config, GPT2LMHeadModel

import slapo_core as slapo
from slapo_runtime.launcher import run_ranks
from slapo_runtime.receipts.attribution import PositionTracker
from slapo_runtime.receipts.memory import MemoryTracker
from slapo_tune import Study
from slapo_tune.errors import StudyError

pytest.importorskip("slapo_deepspeed", reason="needs slapo-deepspeed")
pytest.importorskip("slapo_megatron", reason="needs slapo-megatron")


class Model(nn.Module):
    """Six layers of several sizes, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        widths = (301, 512, 512, 512, 700, 512, 301)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.layers[2].requires_grad_(False)
        self.norm = nn.LayerNorm(301)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x.to(layer.weight.dtype)))
        return self.norm(x.to(self.norm.weight.dtype)).float().square().mean()


def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output


def count(batch: torch.Tensor) -> torch.Tensor:
    return (batch != 0).sum()


adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
SMALL = {"reduce_bucket_size": 300_000, "stage3_prefetch_bucket_size": 100_000, "overlap_comm": False}
DEEPSPEED: dict[str, dict[str, Any]] = {
    "ZeRO-0": {"config": {}},
    "ZeRO-1": {"config": {"zero_optimization": {"stage": 1, **SMALL}}},
    "ZeRO-2": {"config": {"zero_optimization": {"stage": 2, **SMALL}}},
    "ZeRO-3": {"config": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000, **SMALL}}},
    "ZeRO-1, bf16": {"config": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1, **SMALL}}},
    "ZeRO-2, clipped": {"config": {"zero_optimization": {"stage": 2, **SMALL}}, "max_grad_norm": 0.1, "accumulate": 2},
    "ZeRO-1, weighted": {"config": {"zero_optimization": {"stage": 1, **SMALL}}, "loss_weight": count, "accumulate": 2},
}
DISTRIBUTED = {"use_distributed_optimizer": True}
OWN_ADAM = {"lr": 1e-3, "optimizer": "adam", "bf16": True}
MEGATRON: dict[str, dict[str, Any]] = {
    "replicated": {},
    "distributed optimizer": {"ddp_config": DISTRIBUTED},
    "distributed optimizer, two micro-batches": {"ddp_config": DISTRIBUTED, "accumulate": 2},
    "Megatron's Adam, bf16": {"ddp_config": DISTRIBUTED, "optimizer_config": OWN_ADAM, "optimizer": None},
}
FURTHER: tuple[str, ...] = ()
if not os.environ.get("SLAPO_TEST_WHOLE"):
    FURTHER = ("ZeRO-0", "ZeRO-2, clipped", "ZeRO-1, weighted", "distributed optimizer, two micro-batches")


def schedule() -> slapo.Schedule:
    torch.manual_seed(0)
    return slapo.create_schedule(Model(), mesh={"dp": 2}, example_inputs=torch.ones(64, 301))


def ones() -> torch.Tensor:
    return torch.ones(64, 301)


def module_of(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", ""))


class Counting(TorchDispatchMode):
    """Counts the bytes of real tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = MemoryTracker(PositionTracker({}, {}))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            result = communicate(func, args, kwargs or {})
        else:
            result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(result)):  # of a graph that is recorded in a step
            return result
        frame = sys._getframe(1)
        while frame.f_back is not None and module_of(frame).startswith(("torch._compile", "torch._dynamo")):
            frame = frame.f_back
        if module_of(frame) != "torch.distributed.distributed_c10d":  # gloo's own buffers: NCCL has none
            self.memory.on_operation(func, args, kwargs or {}, result)
        return result


def communicate(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a collective on copies: gloo's threads hold its tensors until times of their own."""
    tensors = {leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
    copies = {tensor: tensor.clone() for tensor in tensors}
    result = func(*tree_map_only(torch.Tensor, copies.__getitem__, args), **kwargs)
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.ScriptObject):
            leaf.wait()
        elif isinstance(leaf, torch.Tensor):
            torch.ops._c10d_functional.wait_tensor(leaf)
    for tensor, copy in copies.items():
        tensor.copy_(copy)
    originals = {copy: tensor for tensor, copy in copies.items()}
    return tree_map_only(torch.Tensor, lambda leaf: originals[leaf] if leaf in originals else leaf.clone(), result)


def counted(
    target: str,
    options: dict[str, Any],
    make_schedule: Callable[[], slapo.Schedule] = schedule,
    make_batch: Callable[[], Any] = ones,
) -> int:
    """The largest peak of the steps after the first."""
    gc.freeze()  # collecting before each step looks at what comes now only
    peaks = []
    sch = make_schedule()
    with Counting() as counting:
        arguments = {"optimizer": adamw, "loss": loss if make_schedule is schedule else None, **options}
        engine = slapo.build(sch, target=target, **arguments)
        for _ in range(4):
            counting.memory = fresh(counting.memory)
            engine.train_step(make_batch())
            peaks.append(counting.memory._peak.total)
    engine.close()
    return max(peaks[1:])


def fresh(memory: MemoryTracker) -> MemoryTracker:
    gc.collect()  # what the first step recorded in cycles is freed at times of the collector's own
    memory.begin()
    return memory


def peaks_of_deepspeed() -> dict[str, int]:
    return {name: counted("deepspeed", options) for name, options in DEEPSPEED.items() if name not in FURTHER}


def peaks_of_megatron() -> dict[str, int]:
    import tests.support.cpu_megatron  # noqa: F401 - runs it on the CPU

    return {name: counted("megatron", options) for name, options in MEGATRON.items() if name not in FURTHER}


def estimate(options: dict[str, Any], target: str) -> slapo.Estimate:
    arguments = {"optimizer": adamw, "loss": loss, "target": target, **options}
    return slapo.estimate(schedule(), ones(), **arguments)


@functools.cache
def of_deepspeed(name: str) -> slapo.Estimate:
    return estimate(DEEPSPEED[name], "deepspeed")


@pytest.mark.breadth
@pytest.mark.ranks
def test_peaks_of_deepspeed_are_those_of_two_real_processes() -> None:
    real = run_ranks(peaks_of_deepspeed, world_size=2)[0]
    found = {name: of_deepspeed(name).memory.total for name in real}
    assert found == {name: pytest.approx(peak, rel=0.02) for name, peak in real.items()}
    plain = estimate({}, "torch").memory.total
    assert all(abs(plain - real[name]) > 0.02 * real[name] for name in ("ZeRO-1", "ZeRO-2", "ZeRO-1, bf16"))


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(super().forward(x.to(self.weight.dtype)))


class Deep(nn.Module):
    """Layers of one size, of which a step gathers few at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(256, 256) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


LIVE = {"stage3_max_live_parameters": 100_000, "stage3_max_reuse_distance": 100_000, "overlap_comm": False}
BUCKETS = {"reduce_bucket_size": 10_000, "stage3_prefetch_bucket_size": 10_000, "stage3_param_persistence_threshold": 1}
PARTITIONED: dict[str, Any] = {"zero_optimization": {"stage": 3, **LIVE, **BUCKETS}}


def replicas(dp: int = 2) -> slapo.Schedule:
    torch.manual_seed(0)
    return slapo.create_schedule(Deep(), mesh={"dp": dp}, example_inputs=few())


def few() -> torch.Tensor:
    return torch.ones(2, 256)


SGD: dict[str, Any] = {"optimizer": functools.partial(torch.optim.SGD, lr=1e-3), "loss": loss}


def peak_of_replicas() -> int:
    return counted("deepspeed", {"config": PARTITIONED, **SGD}, replicas, few)


def of_replicas(dp: int, **config: Any) -> int:
    config = {**PARTITIONED, **config}
    return slapo.estimate(replicas(dp), few(), target="deepspeed", config=config, rank=0, **SGD).memory.total


@pytest.mark.breadth
@pytest.mark.ranks
def test_a_step_of_zero_3_takes_less_with_more_replicas() -> None:
    """The whole model is there before its parameters are partitioned, and is not part of a step."""
    real = run_ranks(peak_of_replicas, world_size=2)[0]
    assert of_replicas(2) == pytest.approx(real, rel=0.02)
    assert of_replicas(64) < 0.5 * real


def test_fp16_is_estimated_where_nothing_computes_in_it() -> None:
    half = [of_replicas(2, **{name: {"enabled": True}}) for name in ("fp16", "bf16")]
    assert half[0] == pytest.approx(half[1], rel=0.001)


@pytest.mark.ranks
def test_peaks_of_megatron_are_those_of_two_real_processes() -> None:
    real = run_ranks(peaks_of_megatron, world_size=2)[0]
    found = {name: estimate(MEGATRON[name], "megatron").memory.total for name in real}
    assert found == {name: pytest.approx(peak, rel=0.02) for name, peak in real.items()}
    assert found["distributed optimizer"] < 0.85 * found["replicated"]


CONFIG = GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=4, n_positions=64, use_cache=False)
COMBINED: dict[str, dict[str, Any]] = {"deepspeed": DEEPSPEED["ZeRO-3"], "megatron": {"ddp_config": DISTRIBUTED}}


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.arange(256).reshape(4, 64) % 512
    return {"input_ids": ids, "labels": ids}


def sharded() -> slapo.Schedule:
    torch.manual_seed(0)
    sch = slapo.create_schedule(GPT2LMHeadModel(CONFIG), mesh={"dp": 2, "tp": 2}, example_inputs=tokens())
    sch["transformer.h.*"].trace(flatten=True)  # its graphs are recorded in the estimated step, without memory
    sch["transformer.h.*"].checkpoint()
    for layer in range(CONFIG.n_layer):
        mlp = sch[f"transformer.h.{layer}.mlp"]
        mlp["c_fc"].shard("weight", axis=1)
        mlp["c_fc"].shard("bias", axis=0)
        mlp["c_proj"].shard("weight", axis=0)
        mlp["c_fc"].sync("backward", "all_reduce")
        mlp["c_proj"].sync("forward", "all_reduce")
    return sch


def peak_of_combined(target: str) -> int:
    if target == "megatron":
        import tests.support.cpu_megatron  # noqa: F401 - runs it on the CPU

    return counted(target, COMBINED[target], sharded, tokens)


@pytest.mark.breadth
@pytest.mark.ranks
@pytest.mark.parametrize("target", ["deepspeed", "megatron"])
def test_a_traced_and_checkpointed_model_split_over_ranks(target: str) -> None:
    real = run_ranks(peak_of_combined, target, world_size=4)[0]
    found = slapo.estimate(sharded(), tokens(), optimizer=adamw, target=target, rank=0, **COMBINED[target])
    assert found.memory.total == pytest.approx(real, rel=0.02)
    assert {each.mesh_dim for each in found.kinds[0].collectives} >= {"dp", "tp"}


def matches_where_megatron_runs_without_gpu() -> list[int]:
    from tests.support import cpu_megatron

    cpu_megatron.take_back()
    found = []
    for prepare in (lambda: None, cpu_megatron.install):
        prepare()
        eager = GPT2Config(vocab_size=512, n_embd=64, n_layer=1, n_head=4, use_cache=False, attn_implementation="eager")
        sch = slapo.create_schedule(GPT2LMHeadModel(eager), example_inputs=tokens())
        sch["transformer.h.0"].trace(flatten=True)
        found.append(len(sch["transformer.h.0"].find("fusion.sdpa")))
    return found


@pytest.mark.ranks
def test_patterns_match_as_before_where_megatron_runs_without_gpu() -> None:
    assert run_ranks(matches_where_megatron_runs_without_gpu, world_size=1) == [[1, 1]]


def test_memory_and_messages_of_the_engine_are_listed_apart() -> None:
    found = {name: of_deepspeed(name) for name in ("ZeRO-0", "ZeRO-1", "ZeRO-3")}
    memory = {name: one.memory for name, one in found.items()}
    assert memory["ZeRO-0"].optimizer > memory["ZeRO-1"].optimizer  # the master partition, and half of the moments
    assert memory["ZeRO-3"].parameters < 0.01 * memory["ZeRO-1"].parameters
    kinds = {name: {each.kind for each in one.kinds[0].collectives} for name, one in found.items()}
    assert kinds["ZeRO-1"] >= {"all_gather"}
    assert kinds["ZeRO-3"] >= {"all_gather", "reduce_scatter"}
    assert {each.mesh_dim for each in found["ZeRO-3"].kinds[0].collectives} == {"dp"}
    assert any("target 'deepspeed'" in one for one in found["ZeRO-3"].assumptions)


NOT_KNOWN: dict[str, dict[str, Any]] = {
    "deepspeed": {"config": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}},
    "megatron": {"optimizer": None, "optimizer_config": {"lr": 1e-3, "optimizer_cpu_offload": True}},
}


@pytest.mark.parametrize("target", NOT_KNOWN)
def test_unknown_values_are_listed(target: str) -> None:
    with pytest.raises(slapo.BuildError, match="cannot simulate"):
        estimate(NOT_KNOWN[target], target)


def test_an_offloading_section_that_is_off_is_known() -> None:
    off = {"config": {"zero_optimization": {"stage": 2, **SMALL, "offload_optimizer": {"device": "none"}}}}
    assert estimate(off, "deepspeed").memory == of_deepspeed("ZeRO-2").memory


def batch(p: Any) -> torch.Tensor:
    return torch.ones(p["batch"], 301)


def space(s: Any) -> None:
    s.choose("batch", [8, 4096])


def no_steps(sch: slapo.Schedule, p: Any) -> None:
    """The model as it is."""


def mesh(p: Any) -> dict[str, int]:
    return {"dp": 2}


@pytest.mark.breadth
@pytest.mark.ranks
def test_a_study_of_the_target_starts_what_fits_by_its_own_estimate(tmp_path: Path) -> None:
    study = Study(
        Model,
        space,
        no_steps,
        world_size=2,
        mesh=mesh,
        batch=batch,
        optimizer=adamw,
        loss=loss,
        target="deepspeed",
        options=DEEPSPEED["ZeRO-2"],
        memory="25MiB",  # 21.8 MB with the small batch; as target "torch" runs it, 26.8 MB
        log=tmp_path / "study.jsonl",
        sampler="exhaustive",
        verify=False,
    )
    small, large = study.run().trials
    assert (small.status, large.status) == ("ok", "over_memory")
    assert small.predicted["memory"] < 1.1 * small.measured["memory"]  # gloo's threads may hold more for a while


def test_a_limit_is_refused_where_the_target_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slapo_deepspeed.dialect.DeepSpeedDialect.simulate", slapo.Dialect.simulate)
    with pytest.raises(StudyError, match="does not support"):
        Study(Model, space, no_steps, batch=batch, optimizer=adamw, target="deepspeed", memory="1GiB")
