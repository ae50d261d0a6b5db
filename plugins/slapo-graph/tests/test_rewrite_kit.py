"""Primitives that work on matches keep the promises that every primitive must keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slapo_core.internals import Checkpoint, Replace
from slapo_graph.primitives.merge import Merge
from slapo_graph.primitives.trace import Trace
from slapo_testing import Case, parametrize_checks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.bias, self.drop = nn.Parameter(torch.randn(16)), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.gate(x) + self.bias) * self.up(x)
        return self.drop(self.down(hidden)) + x  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


class Fused(nn.Module):
    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.gelu(x + bias)


def biased(x: Any, bias: Any) -> Any:
    return F.gelu(x + bias)


def product(x: Any, bias: Any, y: Any) -> Any:
    return F.gelu(x + bias) * y


def unlike(x: Any, bias: Any) -> Any:
    return F.relu(x + bias)


def batch() -> tuple[torch.Tensor]:
    return (torch.randn(5, 8),)


COMMON: dict[str, Any] = {
    "model": Model,
    "inputs": batch,
    "before": [("first", Trace()), ("second", Trace())],
}


@pytest.mark.ranks
@parametrize_checks(
    [
        Case(
            Replace(biased, biased),
            path="first",
            rejects=[Replace(biased, unlike), Replace(product, biased), ("first.up", Replace(biased, biased))],
            name="replace-function",
            **COMMON,
        ),
        Case(Replace(biased, biased), path="", name="replace-everywhere", **COMMON),
        Case(Trace(), path="first", model=Model, inputs=batch, rejects=[Trace(leaves=("up",))]),
        Case(lambda: Replace(Fused(), biased), path="second", serializable=False, name="replace-module", **COMMON),
        Case(Checkpoint(product), path="", rejects=[Checkpoint(unlike)], name="checkpoint-matches", **COMMON),
        Case(
            Merge(("gate", "up")),
            path="first",
            rejects=[Merge(("gate", "down")), Merge(("gate",)), ("", Merge(("first.gate", "first.up")))],
            **COMMON,
        ),
    ]
)
def test_each_primitive_at_matches(check: Any) -> None:
    check()
