"""Without a pipeline, Megatron's DistributedDataParallel and optimizers train as the reference model does."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from slapo_testing import run_ranks
from tests.support import tied_model

from .against import Steps, same, stepped, untouched

pytestmark = pytest.mark.ranks

DP, TP, BOTH = {"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}
OWN = {"optimizer": None, "optimizer_config": {"lr": 1e-2, "adam_eps": 1e-4, "weight_decay": 0.1}}
DISTRIBUTED = {
    "ddp_config": {"use_distributed_optimizer": True},
    "optimizer_config": {"use_distributed_optimizer": True},
}
OVERLAPPED = {
    "ddp_config": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "bucket_size": 60,
    },
    "optimizer_config": {"use_distributed_optimizer": True, "overlap_param_gather": True},
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def decayed(parameters: Any) -> torch.optim.Optimizer:
    """Megatron's rule: what has one axis is not decayed."""
    rows = [one for one in parameters if one.dim() == 1]
    rest = [one for one in parameters if one.dim() != 1]
    return torch.optim.AdamW(
        [{"params": rest, "weight_decay": 0.1}, {"params": rows, "weight_decay": 0.0}], lr=1e-2, eps=1e-4
    )


CASES: dict[str, tuple[dict[str, int] | None, dict[str, Any], str]] = {
    "dp": (DP, {}, "adamw"),
    "tp": (TP, {}, "adamw"),
    "dp, three micro-batches": (DP, {"accumulate": 3}, "adamw"),
    "tp, two micro-batches": (TP, {"accumulate": 2}, "adamw"),
    "dp, Megatron's Adam": (DP, OWN, "decayed"),
    "tp, Megatron's Adam": (TP, OWN, "decayed"),
    "dp, SGD": (DP, {"optimizer": sgd}, "sgd"),
    "dp, distributed": (DP, DISTRIBUTED, "adamw"),
    "dp, distributed, overlapped": (DP, {**OVERLAPPED, "accumulate": 3}, "adamw"),
    "dp, Megatron's Adam, distributed": (
        DP,
        {**OWN, **DISTRIBUTED, "optimizer_config": {**OWN["optimizer_config"], **DISTRIBUTED["optimizer_config"]}},  # type: ignore[dict-item]
        "decayed",
    ),
    "dp, overlapped": (DP, {"ddp_config": {"overlap_grad_reduce": True, "bucket_size": 60}}, "adamw"),
    "tp, distributed": (TP, DISTRIBUTED, "adamw"),
}
ON_FOUR = {
    "plain": (BOTH, {"accumulate": 3}, "adamw"),
    "distributed, overlapped": (BOTH, OVERLAPPED, "adamw"),
}
FACTORIES = {"adamw": tied_model.adamw, "decayed": decayed, "sgd": sgd}


def on_rank(cases: dict[str, tuple[dict[str, int] | None, dict[str, Any], str]]) -> dict[str, Steps]:
    from tests.support.cpu_megatron import install

    install()
    found = {}
    for name, (mesh, options, _) in cases.items():
        sch, engine = tied_model.built(mesh, target="megatron", max_grad_norm=tied_model.CLIP, **options)
        is_whole = "use_distributed_optimizer" not in options.get("ddp_config", {})
        found[name] = stepped(sch, engine, gradients=is_whole)
    return found


@functools.cache
def found(world_size: int) -> list[dict[str, Steps]]:
    cases = {1: {"alone": (None, {"accumulate": 2}, "adamw")}, 2: CASES, 4: ON_FOUR}[world_size]
    return run_ranks(on_rank, cases, world_size=world_size)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one(name: str) -> None:
    same([rank[name] for rank in found(2)], untouched(optimizer=FACTORIES[CASES[name][2]]))


@pytest.mark.parametrize("name", ON_FOUR)
def test_replicas_of_pieces_train_as_one_process(name: str) -> None:
    same([rank[name] for rank in found(4)], untouched())


def test_one_process_trains_as_the_reference_model() -> None:
    same([rank["alone"] for rank in found(1)], untouched())
