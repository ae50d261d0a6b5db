"""Tracing keeps the promises that every primitive must keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slapo_core.internals import Checkpoint, Replace
from slapo_graph.primitives.trace import Trace
from slapo_testing import CHECKS, Case, parametrize_checks
from slapo_testing.models import TwoBranched


class Renamed(nn.Module):
    """The function of a linear layer under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.empty(8, 16))
        self.offset = nn.Parameter(torch.empty(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.matrix, self.offset)


def renamed(old: nn.Module) -> nn.Module:
    return Renamed()


def batch() -> tuple[torch.Tensor]:
    return (torch.randn(5, 8),)


COMMON: dict[str, Any] = {"model": TwoBranched, "inputs": batch}
NAMES = {"weight": "matrix", "bias": "offset"}
ONE_PROCESS = [check.name for check in CHECKS if check.name != "forward_and_gradients_on_2_ranks"]


@pytest.mark.ranks
@parametrize_checks(
    [
        Case(
            Trace(example_inputs=torch.ones(5, 8)),
            path="first",
            rejects=[
                Trace(leaves=("up",)),
                Trace(flatten=True, leaves=(int,)),
                ("first.layers", Trace(example_inputs=torch.ones(5, 8))),
            ],
            serializable=False,
            **COMMON,
        ),
        Case(Trace(flatten=True, leaves="up"), path="second", name="trace-flat", **COMMON),
    ]
)
def test_trace(check: Any) -> None:
    check()


@pytest.mark.ranks
@parametrize_checks(
    [
        Case(
            lambda: Trace(flatten=True, example_inputs=(torch.ones(5, 8),)),
            path="first",
            before=[("first.down", Replace(renamed, params=NAMES)), ("first", Checkpoint())],
            serializable=False,
            name="trace-flat-checkpointed",
            **COMMON,
        ),
        Case(
            Checkpoint(),
            path="first.up",
            before=[("first", Trace(flatten=True))],
            name="checkpoint-below-traced",
            **COMMON,
        ),
    ],
    checks=ONE_PROCESS,
)
def test_after_other_steps(check: Any) -> None:
    check()
