"""Regions of autocast in graphs: what autocast keeps of the weights ends with the region, as with torch's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

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
