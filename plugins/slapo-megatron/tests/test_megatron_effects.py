"""The collectives that the plan promises are seen in a first step, and missing where Megatron is kept from them."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch

import slapo_core as slapo
from slapo_testing import run_ranks
from tests.support import tied_model

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]

DP = {"dp": 2}
DISTRIBUTED: dict[str, Any] = {
    "ddp_config": {"use_distributed_optimizer": True},
    "optimizer_config": {"use_distributed_optimizer": True},
}
OVERLAPPED = {"overlap_grad_reduce": True, "bucket_size": 60}
BOTH = {**DISTRIBUTED, "ddp_config": {**OVERLAPPED, "use_distributed_optimizer": True, "overlap_param_gather": True}}
HALF = {"optimizer": None, "optimizer_config": {"lr": 1e-2, "bf16": True}}
RIGHT: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "replicas": (DP, {"accumulate": 2, "max_grad_norm": tied_model.CLIP}),
    "overlapped": (DP, {"ddp_config": OVERLAPPED}),
    "distributed": (DP, {**DISTRIBUTED, "accumulate": 2, "max_grad_norm": tied_model.CLIP}),
    "distributed and overlapped": (DP, BOTH),
    "bf16": (DP, HALF),
    "split": ({"tp": 2}, {"max_grad_norm": tied_model.CLIP}),
    "stages": ({"pp": 2}, {"microbatches": 4}),
}
WIDE = {
    "stages and replicas": ({"dp": 2, "pp": 2}, {"microbatches": 4}),
    "distributed, in stages": ({"dp": 2, "pp": 2}, {"microbatches": 4, **DISTRIBUTED}),
}


def built(mesh: dict[str, int], **options: Any) -> tuple[slapo.Schedule, Any]:
    def cut(sch: slapo.Schedule) -> None:
        if mesh.get("pp", 1) > 1:
            sch["blocks.0"].pipeline_split()

    model = tied_model.make().bfloat16() if options.get("optimizer_config") == HALF["optimizer_config"] else None
    return tied_model.built(mesh, target="megatron", steps=cut, model=model, receipts=True, **options)


def seen(cases: Any) -> dict[str, list[str]]:
    from tests.support.cpu_megatron import install

    install()
    found = {}
    for name, (mesh, options) in cases.items():
        sch, engine = built(mesh, **options)
        for step in range(2):
            engine.train_step(tied_model.share(tied_model.batch(step, 8), sch.mesh))
        found[name] = [str(one) for one in engine.plan.effects]
        engine.close()
    return found


PLANTED: dict[str, tuple[dict[str, Any], str]] = {
    "no exchange": ({}, "seen: 0 bytes"),
    "each micro-batch": ({"accumulate": 2}, "bytes of all_reduce over 'dp' in float32"),
    "not reduced": (DISTRIBUTED, "reduce_scatter over 'dp' in float32, seen: 0"),
    "not gathered": (DISTRIBUTED, "all_gather over 'dp', seen: 0"),
    "another type": ({}, "another type was communicated"),
}


def kept(name: str, engine: Any) -> contextlib.AbstractContextManager[Any]:
    """Keep Megatron from what the plan promises."""
    (chunk,) = engine.megatron.chunks
    if name in ("no exchange", "not reduced"):
        return mock.patch.object(chunk, "finish_grad_sync", return_value=None)
    if name == "not gathered":
        return mock.patch.object(chunk, "start_param_sync", return_value=None)
    if name == "another type":
        return reduced_in_bfloat16(chunk)
    return exchanged_twice(chunk)


@contextlib.contextmanager
def reduced_in_bfloat16(chunk: Any) -> Any:
    plain = torch.distributed.all_reduce

    def lowered(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        low = tensor.bfloat16()
        work = plain(low, *args, **{**kwargs, "async_op": False})
        tensor.copy_(low)
        return work

    with mock.patch.object(torch.distributed, "all_reduce", lowered):
        yield


@contextlib.contextmanager
def exchanged_twice(chunk: Any) -> Any:
    plain = chunk.finish_grad_sync

    def twice(*args: Any, **kwargs: Any) -> None:
        plain(*args, **kwargs)
        plain(*args, **kwargs)

    with mock.patch.object(chunk, "finish_grad_sync", twice):
        yield


def planted() -> dict[str, tuple[str, str]]:
    found = {}
    for name, (options, _) in PLANTED.items():
        sch, engine = built(DP, **options)
        with kept(name, engine):
            try:
                engine.train_step(tied_model.share(tied_model.batch(0, 8), sch.mesh))
                found[name] = ("", "")
            except slapo.ReceiptError as error:
                found[name] = (error.record, str(error))
        engine.close()
    return found


def on_two() -> tuple[dict[str, list[str]], dict[str, tuple[str, str]]]:
    return seen(RIGHT), planted()


def on_four() -> dict[str, list[str]]:
    return seen(WIDE)


def test_effects_on_two_ranks() -> None:
    size = sum(one.numel() for one in tied_model.make().parameters()) * 4
    exchange = f"all_reduce over 'dp' in float32 of {size:,} bytes in each step"
    for rank, (right, errors) in enumerate(run_ranks(on_two, world_size=2)):
        assert right["replicas"] == right["overlapped"] == right["bf16"] == [exchange]
        both = ["reduce_scatter over 'dp' in float32 in each step", "all_gather over 'dp' in each step"]
        assert right["distributed"] == right["distributed and overlapped"] == both
        assert right["split"] == []
        assert right["stages"] == [f"{('send', 'recv')[rank]} over 'pp' in each step"]
        for name, (_, word) in PLANTED.items():
            assert errors[name][0] == "target 'megatron'", (name, errors[name])
            assert word in errors[name][1], (name, errors[name])


@pytest.mark.breadth
def test_effects_on_four_ranks() -> None:
    for found in run_ranks(on_four, world_size=4):
        assert any("all_reduce over 'dp' in float32" in one for one in found["stages and replicas"])
        assert {one.split()[0] for one in found["distributed, in stages"]} >= {"reduce_scatter", "all_gather"}
