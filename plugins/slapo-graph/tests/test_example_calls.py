"""The example call of a module: taken once for all modules, also in the middle of an edit."""

from __future__ import annotations

from unittest.mock import Mock

import torch
from torch import nn

import slapo_core as slapo
from slapo_graph.example_calls import example_call
from slapo_testing.snapshot import ModelSnapshot
from tests.support.edits import Call


class Counted(nn.Linear):
    calls = Mock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counted.calls()
        return super().forward(x)


def test_example_calls_are_taken_once() -> None:
    model = nn.Sequential(*[nn.Sequential(Counted(2, 2), nn.ReLU()) for _ in range(3)])
    sch = slapo.create_schedule(model, example_inputs=torch.ones(1, 2))
    Counted.calls.reset_mock()
    for number in range(3):
        sch[str(number)].apply(Call(lambda node, edit: (edit.note("asks"), example_call(node))[0]))
    assert Counted.calls.call_count == 3  # once for each layer: one run


def test_example_call_is_recorded_during_an_edit() -> None:
    """The edits made so far are as they were afterwards, though an earlier step changed the same place."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    sch = slapo.create_schedule(model, example_inputs=torch.ones(1, 2))
    sch["0"].apply(Call(lambda node, edit: edit.replace_module(node, nn.Linear(2, 3))))
    second, before = nn.Linear(2, 3), ModelSnapshot(model)

    def ask(node: slapo.Node, edit: slapo.Edit) -> None:
        edit.replace_module(node, second)
        assert example_call(sch["1"])[0][0].shape == (1, 2)

    sch["0"].apply(Call(ask))
    assert model[0] is second
    sch.undo()
    assert before.differences(model) == []
