"""A BERT encoder written by hand for tensor parallelism, in Megatron-LM's way: the yardstick for a scheduled one.

Column-parallel query, key, value and first MLP matrix behind an operator whose backward is an all-reduce; row-parallel
second matrices in front of an all-reduce, the bias added after it (Megatron-LM, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F


class CopyToRegion(torch.autograd.Function):
    """Identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class ReduceFromRegion(torch.autograd.Function):
    """All-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class RowParallelLinear(nn.Module):
    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(fan_out, fan_in))
        self.bias = nn.Parameter(torch.zeros(fan_out))

    def forward(self, x: Tensor) -> Tensor:
        return ReduceFromRegion.apply(F.linear(x, self.weight)) + self.bias


class Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, inner: int, ranks: int, epsilon: float) -> None:
        super().__init__()
        self.head_size = hidden // heads
        self.query = nn.Linear(hidden, hidden // ranks)
        self.key = nn.Linear(hidden, hidden // ranks)
        self.value = nn.Linear(hidden, hidden // ranks)
        self.output = RowParallelLinear(hidden // ranks, hidden)
        self.norm_1 = nn.LayerNorm(hidden, eps=epsilon)
        self.up = nn.Linear(hidden, inner // ranks)
        self.down = RowParallelLinear(inner // ranks, hidden)
        self.norm_2 = nn.LayerNorm(hidden, eps=epsilon)

    def forward(self, x: Tensor) -> Tensor:
        parallel = CopyToRegion.apply(x)
        shape = (*x.shape[:-1], -1, self.head_size)
        query, key, value = (
            projection(parallel).view(shape).transpose(1, 2) for projection in (self.query, self.key, self.value)
        )
        context = F.scaled_dot_product_attention(query, key, value)
        context = context.transpose(1, 2).reshape(*x.shape[:-1], -1)
        x = self.norm_1(self.output(context) + x)
        return self.norm_2(self.down(F.gelu(self.up(CopyToRegion.apply(x)))) + x)


class Encoder(nn.Module):
    """A stack of layers; ``load`` copies a scheduled encoder's local weights, so that both compute the same."""

    def __init__(self, *, layers: int, hidden: int, heads: int, inner: int, ranks: int, epsilon: float = 1e-12) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(hidden, heads, inner, ranks, epsilon) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    @torch.no_grad()
    def load(self, encoder: nn.Module) -> None:
        names = {
            "attention.self.query": "query",
            "attention.self.key": "key",
            "attention.self.value": "value",
            "attention.output.dense": "output",
            "attention.output.LayerNorm": "norm_1",
            "intermediate.dense": "up",
            "output.dense": "down",
            "output.LayerNorm": "norm_2",
        }
        for mine, theirs in zip(self.layers, encoder.layer, strict=True):
            for source, target in names.items():
                for name, parameter in mine.get_submodule(target).named_parameters():
                    parameter.copy_(theirs.get_submodule(source).get_parameter(name))
