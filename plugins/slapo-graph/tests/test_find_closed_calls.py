"""A pattern that is not found because modules are calls in the graph: find and errors name them, and the cure."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo_core as slapo
from tests.messages import Messages


class Activation(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x + 1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act, self.last = nn.Linear(4, 4), Activation(), Activation()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.act(self.fc(x)))


SAID = "not searched: 'act', 'last'; "


def added_gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x + 1)


def test_find_and_the_error_name_the_modules_that_were_not_looked_into(message: Messages) -> None:
    sch = slapo.create_schedule(Layer(), example_inputs=torch.randn(2, 4))
    sch.trace()
    assert SAID in repr(sch.find(added_gelu))
    assert sch.find(added_gelu).closed == ("act", "last")
    with pytest.raises(slapo.PreconditionError) as caught:
        sch.checkpoint(match=added_gelu)
    message(caught, "no match for", SAID, "trace(flatten=True)")
    assert SAID not in repr(sch.find("linear"))  # something was found


def test_in_a_flattened_graph_only_modules_that_are_closed_are_named() -> None:
    model = Layer()
    model.get_submodule("act").register_forward_hook(lambda *_: None)  # stays a call: a flattened graph calls it too
    sch = slapo.create_schedule(model, example_inputs=torch.randn(2, 4))
    sch.trace(flatten=True)
    assert len(sch.find(added_gelu)) == 1
    found = sch.find(lambda x: torch.tanh(x))
    assert not found
    assert (found.closed, found.hooked) == ((), ("act",))
    with pytest.raises(slapo.PreconditionError) as caught:
        sch.checkpoint(match=lambda x: torch.tanh(x))
    assert "flatten" not in str(caught.value)
