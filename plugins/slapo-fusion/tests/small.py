"""What the tests of graphs share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_core as slapo

_ANY = slapo.patterns.any_constant()


class Layer(nn.Module):
    """A bias and GELU, then dropout, residual and norm, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6, bias=False)
        self.bias = nn.Parameter(torch.randn(6))
        self.dropout, self.norm = nn.Dropout(0.2), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.dropout(F.gelu(self.up(x) + self.bias)) + x)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def dropout_add(x: Any, residual: Any, p: Any = _ANY, training: Any = _ANY) -> Any:
    return F.dropout(x, p, training) + residual


def bias_gelu_dropout_add(
    x: Any,
    bias: Any,
    residual: Any,
    p: Any = _ANY,
    training: Any = _ANY,
) -> Any:
    return F.dropout(F.gelu(x + bias), p, training) + residual


def layers(count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer() for _ in range(count)])


def traced(count: int = 3) -> slapo.Schedule:
    sch: Any = slapo.create_schedule(layers(count), example_inputs=torch.randn(2, 6))
    sch["*"].trace()
    return sch


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))
