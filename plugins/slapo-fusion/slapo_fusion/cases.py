"""The model on which ``slapo plugins check`` tries the primitives."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_core as slapo
from slapo_core import Primitive


class Feed(nn.Module):
    """A feed-forward layer with everything that the primitives are about."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


def batch() -> tuple[Tensor]:
    return (torch.randn(5, 6),)


def traced() -> Primitive:
    """Return the step that traces a module."""
    sch = slapo.create_schedule(Feed(), example_inputs=batch())
    sch.root.trace()
    return sch.records[0].primitive


def gelu_of_a_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The pattern of what :class:`Feed` computes in the middle."""
    return F.gelu(F.linear(x, weight, bias))


COMMON: dict[str, Any] = {"model": lambda: nn.Sequential(Feed(), Feed()), "inputs": batch}
