"""The effects of target torch and of `fully_shard` in a first step: seen, and missing where they are switched off."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy

import slapo_core as slapo
from slapo_core.effects import Collective
from slapo_runtime.receipts.engines import built_of
from slapo_runtime.receipts.receipt import expectations, receipt
from slapo_runtime.receipts.watch import Watch
from slapo_testing import preload_modules, run_ranks
from slapo_torch.precision import ModelPrecision

preload_modules("slapo_torch.sharded_data", "torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
pytestmark = [pytest.mark.filterwarnings("ignore")]


def blocks(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))).to(dtype)


def scheduled(
    mesh: dict[str, int] | None, *, marks: bool = False, cuts: bool = False, dtype: Any = torch.float64
) -> Any:
    sch = slapo.create_schedule(blocks(dtype), mesh=mesh, example_inputs=(torch.zeros(4, 8, dtype=dtype),))
    if marks:
        sch["*"].fully_shard()
    if cuts:
        sch["1"].pipeline_split()
    return sch


def built(sch: Any, **options: Any) -> Any:
    return slapo.build(
        sch,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        loss=lambda output, batch: output.square().mean(),
        receipts=True,
        **options,
    )


def batch(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor]:
    return (torch.ones(4, 8, dtype=dtype),)


F32 = {"dtype": torch.float32}
RIGHT: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "replicas": ({"dp": 2}, {}, {"max_grad_norm": 1.0, "loss_weight": lambda _: torch.tensor(4.0)}),
    "accumulated": ({"dp": 2}, {}, {"accumulate": 2, "find_unused_parameters": True}),
    "bf16-mixed": ({"dp": 2}, F32, {"precision": "bf16-mixed"}),
    "fp16-mixed": ({"dp": 2}, F32, {"precision": "fp16-mixed"}),
    "bf16 but for a module": ({"dp": 2}, F32, {"precision": "bf16", "fp32": "1"}),
    "units": ({"dp": 2}, {"marks": True}, {"accumulate": 2, "max_grad_norm": 1.0}),
    "kept units": ({"dp": 2}, {}, {"data_parallel": "fsdp", "reshard_after_forward": False}),
    "mixed units": ({"dp": 2}, {"marks": True, **F32}, {"precision": "bf16-mixed", "fp32": "1"}),
    "stages": ({"pp": 2}, {"cuts": True}, {"max_grad_norm": 1.0}),
    "one of two": ({"tp": 2}, {}, {}),
}
WIDE: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "replicated units": ({"dp_replicate": 2, "dp": 2}, {"marks": True}, {"accumulate": 2}),
    "stages and replicas": ({"pp": 2, "dp": 2}, {"cuts": True}, {}),
    "stages and shards": ({"pp": 2, "dp": 2}, {"cuts": True}, {"data_parallel": "fsdp", "max_grad_norm": 1.0}),
}


def seen(cases: dict[str, Any]) -> dict[str, list[str]]:
    """What the plans expect; each first step raises if an effect is missing, and nothing stays afterwards."""
    found = {}
    for name, (mesh, steps, options) in cases.items():
        engine = built(scheduled(mesh, **steps), **options)
        assert "train_step" in vars(engine)
        for _ in range(2):
            engine.train_step(batch(steps.get("dtype", torch.float64)))
        assert "train_step" not in vars(engine)
        found[name] = [str(one) for one in engine.plan.effects]
        engine.close()
    return found


def no_sync(engine: Any) -> None:
    engine.torch.module.require_backward_grad_sync = False


def in_float16(engine: Any) -> None:
    engine.torch.module.register_comm_hook(None, fp16_compress_hook)


def in_each_micro_batch(engine: Any) -> None:
    engine.torch.no_sync = contextlib.nullcontext


def no_reduction(engine: Any) -> None:
    engine.module.set_requires_gradient_sync(False)


def keep_gathered(engine: Any) -> None:
    engine.module.set_reshard_after_forward(False)


def without_a_mark(sch: Any, **_: Any) -> Any:
    from slapo_torch.fully_shard import FullyShard

    return {path: FullyShard() for path in ("0", "2")}


def in_float32(self: Any, path: str) -> Any:
    return MixedPrecisionPolicy(reduce_dtype=torch.float32)


Plant = Callable[[Any], None]
PLANTED: dict[str, tuple[bool, dict[str, Any], Plant | None, str, str]] = {
    "no_sync": (False, {}, no_sync, "target 'torch'", "all_reduce over 'dp'"),
    "compressed": (False, {}, in_float16, "target 'torch'", "in float16"),
    "each micro-batch": (False, {"accumulate": 2}, in_each_micro_batch, "target 'torch'", "3,456 bytes"),
    "no reduction": (True, {}, no_reduction, "target 'torch'", "3 x reduce_scatter over 'dp' in float64"),
    "reduced twice": (True, {"accumulate": 2}, in_each_micro_batch, "target 'torch'", "seen: 6 (6 in float64)"),
    "never resharded": (True, {}, keep_gathered, "target 'torch'", "6 x all_gather over 'dp'"),
    "reduced in float32": (True, {}, None, "target 'torch'", "another type was communicated"),
    "a mark ignored": (True, {}, None, "#2 fully_shard() at '1'", "all_gather over 'dp' in each forward"),
}
PATCHES: dict[str, Any] = {
    "reduced in float32": lambda: mock.patch.object(ModelPrecision, "policy", in_float32),
    "a mark ignored": lambda: mock.patch("slapo_torch.engine.units_of", without_a_mark),
}


def planted() -> dict[str, tuple[str, str]]:
    """The record and the message of the error of each first step."""
    found = {}
    for name, (marks, options, plant, _, _) in PLANTED.items():
        with PATCHES.get(name, contextlib.nullcontext)():
            engine = built(scheduled({"dp": 2}, marks=marks), **options)
        if plant is not None:
            plant(engine)
        try:
            engine.train_step(batch())
            found[name] = ("", "")
        except slapo.ReceiptError as error:
            found[name] = (error.record, str(error))
        assert "train_step" not in vars(engine)
        engine.close()
    return found


def by_hand() -> list[list[str]]:
    """The marks that a loop of one's own misses before, and after, it calls `fully_shard`."""
    found = []
    for shards in (False, True):
        sch = scheduled({"dp": 2}, marks=True)
        expected = expectations(sch, by_runtime=True)
        if shards:
            slapo.fully_shard(sch)
        watch = Watch(sch)
        with watch.watching() as record:
            record.steps = 1
            sch.model(*batch()).sum().backward()
        found.append([one.source for one in receipt(expected, record) if not one.is_seen])
        assert not [one for one in expectations(sch) if "fully_shard" in one.source]  # of a run without a runtime
    return found


def on_two() -> tuple[Any, Any, Any]:
    return seen(RIGHT), planted(), by_hand()


@pytest.mark.ranks
def test_effects_on_two_ranks() -> None:
    for right, errors, marks in run_ranks(on_two, world_size=2):
        assert right["replicas"] == ["all_reduce over 'dp' in float64 of 1,728 bytes in each step"]
        assert right["bf16 but for a module"] == ["all_reduce over 'dp' of 576 bytes in each step"]
        assert "1 x all_gather over 'dp' in bfloat16 in each backward" in right["mixed units"]
        assert "1 x reduce_scatter over 'dp' in float32 in each step" in right["mixed units"]
        assert right["one of two"] == []
        for name, (*_, record, word) in PLANTED.items():
            assert errors[name][0] == record, (name, errors[name])
            assert word in errors[name][1], (name, errors[name])
        assert marks == [[f"#{number + 1} fully_shard() at '{number}'" for number in range(3)], []]


def on_four() -> dict[str, list[str]]:
    return seen(WIDE)


@pytest.mark.breadth
@pytest.mark.ranks
def test_effects_on_four_ranks() -> None:
    for found in run_ranks(on_four, world_size=4):
        assert "1 x all_reduce over 'dp_replicate' in float64 in each step" in found["replicated units"]
        assert any("all_reduce over 'dp' in float64" in one for one in found["stages and replicas"])
        assert {one.partition(" over")[0] for one in found["stages and shards"]} >= {"all_gather", "reduce_scatter"}


def test_one_rank_shards_nothing() -> None:
    """The same schedule on one rank trains, its plan says that the marks do nothing, and there is no alarm."""
    sch = scheduled(None, marks=True)
    engine = built(sch)
    engine.train_step(batch())
    assert engine.plan.effects == ()
    assert any("its marks (3 units) have no effect" in line for line in engine.plan.steps)
    assert built_of(engine).expected == ()


def test_verify_says_which_steps_do_nothing_without_a_target() -> None:
    note = "without target 'torch' these steps do nothing: #1 fully_shard() at '0' and 2 more"
    assert slapo.verify(scheduled(None, marks=True)).notes == (note,)
    assert slapo.verify(scheduled(None)).notes == ()


def test_marks_expect_gathering_where_it_can_happen() -> None:
    sch = scheduled({"dp": 2}, marks=True)
    first = sch.records[0]
    assert list(first.primitive.effects(sch["0"])) == [Collective("all_gather", "dp", at="0")]
    assert not list(first.primitive.effects(scheduled({"dp": 2, "pp": 2}, marks=True)["0"]))
