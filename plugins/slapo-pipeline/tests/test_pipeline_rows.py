"""Rows that are picked by values: right inside of a module that stays whole, refused by all alike above the cuts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core import TraceError
from tests.messages import Messages

from .staging import asked, bound, compare, cut


class Picking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.fc(x)
        rows = (hidden[:, 0] > 0).nonzero().squeeze(-1)
        return x.index_add(0, rows, hidden[rows].tanh())


class Net(nn.Module):
    def __init__(self, *, is_above: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_above = is_above
        self.layers = nn.ModuleList(Picking() for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x[x[:, 0] > 0] if self.is_above else x


X, OTHER = torch.rand(2, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) - 0.5


def test_rows_that_a_layer_picks_are_its_own() -> None:
    model = Net().double()
    made = compare(model, ["layers.0", "layers.1"], X)
    assert torch.equal(made.run(bound(model, (OTHER,), {})), model(OTHER))  # other rows, as many or not
    assert len(cut(Net().double().to("meta"), ["layers.1"], X).partition.stages) == 2  # as ranks of other stages ask


def test_rows_picked_above_the_cuts_are_refused_where_ranks_hold_stages(message: Messages) -> None:
    sch = slapo.create_schedule(Net(is_above=True).double(), mesh={"pp": 2}, example_inputs=(X,))
    sch["layers.1"].pipeline_split()
    with pytest.raises(TraceError) as caught:
        asked(sch, X)
    message(caught.value.message.partition(" at /")[0], "whose shape depends on values")
    message(caught.value.hint, "index_add")
