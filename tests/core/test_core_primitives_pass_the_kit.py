"""The core's own primitives keep the promises that every plugin's must keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slapo_core.primitives.annotate import Annotate
from slapo_core.primitives.checkpoint import Checkpoint
from slapo_core.primitives.replace import Replace
from slapo_testing import CHECKS, Case, parametrize_checks
from slapo_testing.models import TwoBranched


class OtherLinear(nn.Linear):
    """The same function, written otherwise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


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
            Annotate("weight", "no_weight_decay", True),
            path="first.up",
            rejects=[Annotate("wieght", "mark", 1), Annotate("weight", "data", 1), Annotate("weight", "not a name", 1)],
            **COMMON,
        ),
        Case(Checkpoint(), path="first", rejects=[("second.layers", Checkpoint())], **COMMON),
        Case(
            lambda: Replace(OtherLinear(16, 8)),
            path="first.down",
            rejects=[lambda: Replace(OtherLinear(16, 4)), Replace(OtherLinear), ("", lambda: Replace(TwoBranched()))],
            serializable=False,
            **COMMON,
        ),
    ]
)
def test_each_primitive_of_the_core(check: Any) -> None:
    check()


@pytest.mark.ranks
@parametrize_checks(
    [
        Case(
            Annotate("weight", "master", torch.float64),
            path="first.up",
            before=[("first.up", Annotate("weight", "master", "other"))],
            serializable=False,
            name="annotate-anew",
            **COMMON,
        ),
        Case(
            Checkpoint(preserve_rng_state=True),
            path="second.up",
            before=[("first.up", Checkpoint())],
            rejects=[("first.up", Checkpoint())],
            name="checkpoint-inside",
            **COMMON,
        ),
        Case(
            lambda: Replace(renamed, params=NAMES),
            path="second.down",
            before=[("second.down", Annotate("weight", "mark", 1))],
            name="replace-renamed",
            **COMMON,
        ),
        Case(
            lambda: Replace(OtherLinear(8, 16), params={"weight": "weight"}),
            path="first.up",
            before=[("first", Checkpoint())],
            serializable=False,
            name="replace-tied",
            **COMMON,
        ),
    ],
    checks=ONE_PROCESS,
)
def test_after_other_steps(check: Any) -> None:
    check()
