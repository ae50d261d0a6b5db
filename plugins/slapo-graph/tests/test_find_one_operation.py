"""All ways to write one operation are found by all ways to write it, and no other operation is."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo_core as slapo
from slapo_graph.patterns.operations import operation_of
from tests.tiers import sampled

from .finding import traced

X = torch.randn(2, 3, 4)
Y = torch.randn(2, 3, 4)

SAME: dict[str, list[Callable[..., Any]]] = {
    "relu": [F.relu, torch.relu, lambda x: x.relu(), nn.ReLU()],
    "gelu": [F.gelu, nn.GELU(), lambda x: F.gelu(x, approximate="none"), nn.GELU("none")],
    "gelu tanh": [lambda x: F.gelu(x, approximate="tanh"), nn.GELU("tanh")],
    "silu": [F.silu, nn.SiLU()],
    "tanh": [torch.tanh, lambda x: x.tanh(), nn.Tanh(), F.tanh],
    "sigmoid": [torch.sigmoid, lambda x: x.sigmoid(), nn.Sigmoid(), F.sigmoid, torch.special.expit],
    "leaky_relu": [lambda x: F.leaky_relu(x, 0.2), nn.LeakyReLU(0.2), lambda x: F.leaky_relu(x, negative_slope=0.2)],
    "softplus": [F.softplus, nn.Softplus(), lambda x: F.softplus(x, 1.0, 20.0)],
    "softmax over the last axis": [
        lambda x: x.softmax(-1),
        lambda x: x.softmax(dim=-1),
        lambda x: F.softmax(x, dim=-1),
        lambda x: F.softmax(x, -1),
        lambda x: torch.softmax(x, -1),
        lambda x: torch.softmax(x, 2),
        nn.Softmax(-1),
        lambda x: torch.special.softmax(x, -1),
    ],
    "softmax over the first axis": [lambda x: x.softmax(0), lambda x: F.softmax(x, dim=0), nn.Softmax(0)],
    "softmax in float32": [
        lambda x: F.softmax(x, dim=-1, dtype=torch.float32),
        lambda x: torch.softmax(x, -1, torch.float32),
        lambda x: x.softmax(-1, dtype=torch.float32),
    ],
    "dropout": [lambda x: F.dropout(x, 0.1), lambda x: torch.dropout(x, 0.1, True), nn.Dropout(0.1)],
    "add": [
        lambda x, y: x + y,
        lambda x, y: y + x,
        torch.add,
        lambda x, y: x.add(y),
        lambda x, y: torch.add(y, x, alpha=1),
        lambda x, y: torch.add(input=x, other=y),
        operator.add,
    ],
    "add 2": [lambda x, y: x * y + 2, lambda x, y: 2 + x * y, lambda x, y: torch.add(y.mul(x), 2)],
    "sub": [lambda x, y: x - y, torch.sub, lambda x, y: x.sub(y), torch.subtract, lambda x, y: torch.rsub(y, x)],
    "mul": [lambda x, y: x * y, torch.mul, lambda x, y: y.mul(x), torch.multiply],
    "div": [lambda x, y: x / y, torch.div, lambda x, y: x.div(y), torch.true_divide],
    "from 1": [lambda x, y: 1 - x * y, lambda x, y: torch.rsub(x * y, 1)],
    "pow": [lambda x: x**2, lambda x: x.pow(2), lambda x: torch.pow(x, 2), lambda x: x.pow(2.0)],
    "eq": [lambda x, y: x == y, torch.eq, lambda x, y: y == x],
    "lt": [lambda x, y: x < y, torch.lt, lambda x, y: x.less(y)],
    "maximum": [torch.maximum, lambda x, y: torch.maximum(y, x), lambda x, y: x.maximum(y)],
    "max of two": [lambda x, y: torch.max(x, y), lambda x, y: torch.max(y, x), lambda x, y: x.max(y)],
    "matmul": [lambda x, y: x @ y.mT, lambda x, y: torch.matmul(x, y.mT), lambda x, y: x.matmul(y.mT)],
    "transpose": [lambda x: x.transpose(-1, -2), lambda x: torch.transpose(x, 1, 2), lambda x: x.swapaxes(1, 2)],
    "view": [lambda x: x.view(6, 4), lambda x: x.view((6, 4)), lambda x: x.view([6, 4]), lambda x: x.view(size=(6, 4))],
    "permute": [lambda x: x.permute(0, 2, 1), lambda x: x.permute((0, 2, 1)), lambda x: torch.permute(x, (0, 2, -2))],
    "mean": [lambda x: x.mean(-1), lambda x: x.mean((-1,)), lambda x: torch.mean(x, dim=[-1]), lambda x: x.mean(2)],
    "mean kept": [lambda x: x.mean(-1, True), lambda x: x.mean(-1, keepdim=True), lambda x: torch.mean(x, -1, True)],
    "sum": [lambda x: x.sum(), torch.sum],
    "to half": [lambda x: x.half(), lambda x: x.to(torch.float16), lambda x: x.to(dtype=torch.float16)],
    "cat": [lambda x, y: torch.cat([x, y], -1), lambda x, y: torch.concat((x, y), dim=2)],
    "chunk": [lambda x: x.chunk(2, -1), lambda x: torch.chunk(x, 2, dim=-1)],
    "split": [lambda x: x.split(2, -1), lambda x: torch.split(x, 2, dim=-1), lambda x: x.split(split_size=2, dim=-1)],
    "split in sizes": [lambda x: x.split([1, 3], -1), lambda x: torch.split(x, [1, 3], dim=-1)],
    "index": [lambda x: x[:, 0], lambda x: x[:, 0]],
    "max_pool": [lambda x: F.max_pool1d(x, 2), nn.MaxPool1d(2), lambda x: F.max_pool1d(x, (2,), stride=2)],
    "avg_pool": [lambda x: F.avg_pool1d(x, 2), nn.AvgPool1d(2), lambda x: torch.avg_pool1d(x, (2,))],
    "adaptive_avg_pool": [lambda x: F.adaptive_avg_pool1d(x, 1), nn.AdaptiveAvgPool1d(1)],
    "rsqrt": [torch.rsqrt, lambda x: x.rsqrt()],
    "clamp": [lambda x: x.clamp(0, 1), lambda x: torch.clamp(x, min=0, max=1), lambda x: x.clip(0, 1)],
    "masked_fill": [
        lambda x, y: x.masked_fill(y > 0, -math.inf),
        lambda x, y: torch.masked_fill(x, y > 0, float("-inf")),
    ],
    "where": [
        lambda x, y: torch.where(x > y, x, y),
        lambda x, y: x.where(x > y, y),
        lambda x, y: torch.where(condition=x > y, input=x, other=y),
    ],
    "attention": [
        lambda x, y: F.scaled_dot_product_attention(x, y, y),
        lambda x, y: F.scaled_dot_product_attention(x, key=y, value=y, attn_mask=None, dropout_p=0.0),
    ],
}  # fmt: skip


def inputs_of(name: str) -> tuple[torch.Tensor, ...]:
    both = (
        "add",
        "sub",
        "mul",
        "div",
        "from",
        "eq",
        "lt",
        "maximum",
        "max of",
        "matmul",
        "cat",
        "masked",
        "where",
        "attention",
    )
    return (X, Y) if name.startswith(both) else (X,)


def of_one(form: Callable[..., Any], name: str) -> slapo.Schedule:
    if isinstance(form, nn.Module):
        return traced(lambda *inputs, below: below(*inputs), *inputs_of(name), below=form)
    return traced(form, *inputs_of(name))


@pytest.mark.parametrize("name", sampled(SAME))
def test_each_spelling_finds_each_spelling(name: str) -> None:
    for form in SAME[name]:
        schedule = of_one(form, name)
        for pattern in SAME[name]:
            assert len(schedule.find(pattern)) == 1, (pattern, form)


def test_no_operation_finds_another() -> None:
    for other in SAME:
        schedule = of_one(SAME[other][0], other)
        for name in SAME:
            if name != other and (name, other) not in CONTAINED and len(inputs_of(name)) == len(inputs_of(other)):
                assert not schedule.find(SAME[name][0]), (name, other)


CONTAINED = {("mul", "add 2"), ("mul", "from 1"), ("lt", "where")}


def test_different_functions_of_one_name_stay_different() -> None:
    names = [operation_of(function) for function in (torch.masked.softmax, torch.sparse.sum, torch.softmax, torch.sum)]
    assert names == ["torch.masked._ops.softmax", "torch.sparse.sum", "softmax", "sum"]
