"""A new child is in the mode of the module that it comes into: a dropout in it is silent in evaluation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import slapo_core as slapo

X = torch.randn(3, 4)


class Halved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.linear(x))


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Dropout(0.5))

    def forward(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(y)


@pytest.mark.parametrize("training", [True, False])
def test_a_new_child_takes_the_mode_of_its_place(training: bool) -> None:
    model, new = nn.Sequential(Halved()).train(training), Dropped().train(not training)
    untouched = model(X)
    schedule = slapo.create_schedule(model, example_inputs=X)
    schedule["0"].trace()
    schedule["0"].replace(new, lambda y, x: x + slapo.patterns.call_module("dropout", y))
    assert {module.training for module in model.modules()} == {training}
    if not training:
        torch.testing.assert_close(model(X), untouched, rtol=0, atol=0)
    schedule.undo()
    assert {module.training for module in new.modules()} == {not training}
