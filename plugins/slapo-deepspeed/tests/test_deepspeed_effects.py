"""The collectives that the plan promises are seen in a first step, and missing where DeepSpeed is kept from them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import slapo_core as slapo
from slapo_deepspeed.dialect import DeepSpeedDialect
from slapo_runtime.planning import plan_of
from slapo_testing import preload_modules, run_ranks

from . import small

preload_modules("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.runtime.zero.stage3")
pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]

DP = {"dp": 2}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, **more}


BF16 = {"bf16": {"enabled": True}}
RIGHT: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "no ZeRO": (DP, zero(0), {"max_grad_norm": small.CLIP}),
    "ZeRO-1 in bf16": (DP, zero(1, **BF16), {"accumulate": 2}),
    "ZeRO-2": (DP, zero(2), {"accumulate": 2}),
    "ZeRO-3 in bf16": (DP, zero(3, **BF16), {"max_grad_norm": small.CLIP}),
    "ZeRO-3, nothing kept": (DP, {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}, {}),
    "split": ({"tp": 2}, zero(0), {"max_grad_norm": small.CLIP}),
    "stages": ({"pp": 2}, {}, {"accumulate": 2}),
}
WIDE = {"stages and replicas": ({"pp": 2, "dp": 2}, BF16, {"accumulate": 2})}


def cut(sch: slapo.Schedule) -> None:
    if sch.mesh is not None and sch.mesh.size("pp") > 1:
        sch["blocks.0"].pipeline_split()


def seen(cases: Any) -> dict[str, list[str]]:
    found = {}
    for name, (mesh, config, options) in cases.items():
        sch, engine = small.built(mesh, config, steps=cut, receipts=True, **options)
        for step in range(2):
            engine.train_step(small.share(small.batch(step, 8), sch.mesh))
        found[name] = [str(one) for one in engine.plan.effects]
        engine.close()
    return found


def kept(name: str, engine: Any) -> Any:
    """Keep DeepSpeed from what the plan promises."""
    if name == "no exchange":
        return mock.patch.object(engine.deepspeed, "allreduce_gradients", return_value=None)
    if name == "another type":
        return mock.patch.object(type(engine.deepspeed), "communication_data_type", torch.bfloat16)
    if name == "no exchange by ZeRO":
        return mock.patch.object(engine.deepspeed.optimizer, "average_tensor", return_value=None)
    if name == "not gathered":
        return mock.patch("deepspeed.runtime.zero.stage_1_and_2.all_gather_dp_groups", return_value=None)
    return mock.patch("deepspeed.runtime.zero.stage3.reduce_scatter_coalesced", own_part)


def own_part(gradients: list[torch.Tensor], group: Any = None) -> list[torch.Tensor]:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    padded = [torch.nn.functional.pad(one.flatten(), (0, -one.numel() % size)) for one in gradients]
    return [one.chunk(size)[rank] for one in padded]


PLANTED = {
    "no exchange": (0, "all_reduce over 'dp' in float32, seen: 0"),
    "another type": (0, "another type was communicated"),
    "no exchange by ZeRO": (1, "all_reduce over 'dp' in float32, seen: 0"),
    "not gathered": (2, "all_gather over 'dp', seen: 0"),
    "not reduced": (3, "reduce_scatter over 'dp' in float32, seen: 0"),
}


def planted() -> dict[str, tuple[str, str]]:
    found = {}
    for name, (stage, _) in PLANTED.items():
        sch, engine = small.built(DP, zero(stage), receipts=True, max_grad_norm=small.CLIP)
        with kept(name, engine):
            try:
                engine.train_step(small.share(small.batch(0), sch.mesh))
                found[name] = ("", "")
            except slapo.ReceiptError as error:
                found[name] = (error.record, str(error))
        engine.close()
    return found


def in_fp16() -> list[str]:
    """A step that overflows is skipped, and gathers nothing."""
    sch, config = slapo.create_schedule(small.make(), mesh=DP), zero(1, fp16={"enabled": True})
    return [str(one) for one in plan_of(DeepSpeedDialect(), sch, {"config": config}).effects]


def on_two() -> tuple[dict[str, list[str]], dict[str, tuple[str, str]]]:
    return seen(RIGHT) | {"ZeRO-1 in fp16": in_fp16()}, planted()


def on_four() -> dict[str, list[str]]:
    return seen(WIDE)


def test_effects_on_two_ranks() -> None:
    for rank, (right, errors) in enumerate(run_ranks(on_two, world_size=2)):
        assert right["no ZeRO"] == ["all_reduce over 'dp' in float32 in each step"]
        both = ["all_reduce over 'dp' in bfloat16 in each step", "all_gather over 'dp' in each step"]
        assert right["ZeRO-1 in bf16"] == both
        assert right["ZeRO-3 in bf16"] == ["reduce_scatter over 'dp' in bfloat16 in each step", both[1]]
        assert right["ZeRO-1 in fp16"] == ["all_reduce over 'dp' in float16 in each step"]
        assert right["split"] == []
        assert right["stages"] == [f"{('send', 'recv')[rank]} over 'pp' in each step"]
        for name, (_, word) in PLANTED.items():
            assert errors[name][0] == "target 'deepspeed'", name
            assert word in errors[name][1], (name, errors[name])


@pytest.mark.breadth
def test_effects_on_four_ranks() -> None:
    for found in run_ranks(on_four, world_size=4):
        assert {one.split()[0] for one in found["stages and replicas"]} >= {"all_reduce", "all_gather"}
