"""Odd parameters, and odd reads of them, over replicas."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo_core as slapo
from slapo_testing import run_ranks

from .against import Steps, same, stepped, untouched

pytestmark = pytest.mark.ranks

DISTRIBUTED = {
    "ddp_config": {"use_distributed_optimizer": True},
    "optimizer_config": {"use_distributed_optimizer": True},
}
OVERLAPPED = {
    "ddp_config": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "bucket_size": 10,
    },
    "optimizer_config": {"use_distributed_optimizer": True, "overlap_param_gather": True, "clip_grad": 0.0},
}


class Reaching(nn.Module):
    """Reads the weights of modules that it does not call, or calls later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.never, self.later = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(self.first(x).tanh(), self.never.weight, self.never.bias) * self.later.weight.square().mean()
        return self.later(y).square().mean()


def reaching() -> nn.Module:
    torch.manual_seed(8)
    return Reaching()


def sparse() -> nn.Module:
    """An embedding whose gradient is sparse."""
    torch.manual_seed(9)

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(9, 6, sparse=True), nn.Linear(6, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.words(x)).square().mean()

    return Words()


def rows(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(6, 6, generator=torch.Generator().manual_seed(step))}


def ids(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randint(0, 9, (6, 3), generator=torch.Generator().manual_seed(step))}


def large(parameters: Any) -> torch.optim.Optimizer:
    """So that a step makes a difference."""
    return torch.optim.AdamW(parameters, lr=0.1, eps=1e-4)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def on_rank() -> dict[str, Steps]:
    from tests.support.cpu_megatron import install

    install()
    found = {}
    for name, traced in (("reaching", False), ("traced", True)):
        sch = slapo.create_schedule(reaching(), mesh={"dp": 2}, example_inputs=rows(0))
        if traced:
            sch.trace(flatten=True)
        engine = slapo.build(sch, target="megatron", optimizer=large, **OVERLAPPED)
        found[name] = stepped(sch, engine, batch=rows, gradients=False)
    sch = slapo.create_schedule(sparse(), mesh={"dp": 2})
    engine = slapo.build(sch, target="megatron", optimizer=sgd, max_grad_norm=0.05)
    found["sparse"] = stepped(sch, engine, batch=ids)
    return found


@functools.cache
def found() -> list[dict[str, Steps]]:
    return run_ranks(on_rank, world_size=2)


@pytest.mark.parametrize("name", ["reaching", "traced"])
def test_parameters_of_modules_that_are_not_called_are_gathered(name: str) -> None:
    same([rank[name] for rank in found()], untouched(reaching, large, clip=None, batch=rows), rel=1e-5)


def test_sparse_gradients_equal_a_dense_embeddings() -> None:
    def dense() -> nn.Module:
        model = sparse()
        model.words.sparse = False  # type: ignore[union-attr]
        return model

    same([rank["sparse"] for rank in found()], untouched(dense, sgd, clip=0.05, batch=ids))
