"""Regions of autocast in graphs: what autocast keeps of the weights ends with the region, as with torch's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import slapo_core as slapo


class Mixed(nn.Module):
    """A part in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.first(x).tanh()
        return self.second(hidden.float()).square().mean()


def trained(model: nn.Module, *, evaluated: bool) -> list[float]:
    """Losses of three steps that change the weights by much."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for seed in range(3):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        if evaluated:
            with torch.no_grad():
                model(x)
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("evaluated", [False, True], ids=["training", "evaluation before each step"])
def test_weights_in_bfloat16_are_those_of_the_last_step(evaluated: bool) -> None:
    model = Mixed()
    untouched = copy.deepcopy(model)
    sch = slapo.create_schedule(model, example_inputs=torch.randn(8, 4))
    sch.root.trace()
    assert "autocast" in str(sch.root.graph)
    assert trained(model, evaluated=evaluated) == trained(untouched, evaluated=evaluated)


class Attention(nn.Module):
    """Positions are rotated in float32, as the attention of LLaMA does."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        with torch.autocast("cpu", enabled=False):
            angles = torch.arange(x.shape[1], dtype=torch.float32)[:, None] / 8
            query, key = (part.float() * angles.cos() + part.float().flip(-1) * angles.sin() for part in (query, key))
        return self.out(F.scaled_dot_product_attention(query.to(value.dtype), key.to(value.dtype), value))


class Casts(TorchDispatchMode):
    """Counts how often parameters are converted to another type."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.parameters, self.count = {id(parameter) for parameter in model.parameters()}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default and id(args[0]) in self.parameters
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("traced", [False, True])
def test_weights_are_cast_once_in_a_region_that_holds_several_calls(traced: bool) -> None:
    model = nn.Sequential(Attention(), Attention())
    x = torch.randn(2, 3, 8)
    if traced:
        sch = slapo.create_schedule(model, example_inputs=x)
        sch["*"].trace()
        assert "autocast" in str(sch["0"].graph)
    with torch.autocast("cpu", torch.bfloat16):
        model(x)  # what is recorded then does not count
    for _ in range(2):  # the second region starts anew
        with Casts(model) as casts, torch.autocast("cpu", torch.bfloat16):
            (model(x) + model(x)).sum().backward()
        assert casts.count == len(list(model.parameters()))


class Distilled(nn.Module):
    """Calls a layer without gradients and with them, each in a region of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            target = self.layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            return (self.layer(x) - target - 1).float().square().mean()


def test_a_copy_made_without_gradients_is_not_used_where_gradients_are_taken() -> None:
    model = Distilled()
    untouched = copy.deepcopy(model)
    sch = slapo.create_schedule(model, example_inputs=torch.randn(8, 4))
    sch.root.trace()
    assert trained(model, evaluated=False) == trained(untouched, evaluated=False)
