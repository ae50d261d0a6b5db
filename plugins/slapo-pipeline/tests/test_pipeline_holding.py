"""What a stage holds: what it runs, at the reference paths, and nothing that it only asks about."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import GuardError
from tests.messages import Messages

from .staging import compare, cut


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj, self.own = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.own(self.proj(x))


class Model(nn.Module):
    """Calls a part of a module before the module itself; asks parameters of the first stage for sizes in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(4, 4), Part()
        self.table = nn.Parameter(torch.rand(6, 4))

    def forward(self, x: Any) -> Any:
        h = self.first(x + self.table.sum(0))
        h = self.part.proj(h)
        h = self.part(h)
        rows = self.table.shape[0]
        assert self.table.dtype.is_floating_point
        return h.view(rows, -1).to(self.table.dtype) / self.first.weight.shape[1]


def test_a_stage_contains_the_modules_that_it_runs() -> None:
    torch.manual_seed(0)
    model = Model().double()
    made = compare(model, ["first"], torch.rand(6, 4, dtype=torch.float64))
    first, last = (stage.module for stage in made.partition.stages)
    assert last.get_submodule("part") is model.part
    assert sorted(dict(first.named_parameters())) == ["first.bias", "first.weight", "table"]
    held = [f"part.{each}.{own}" for each in ("own", "proj") for own in ("bias", "weight")]
    assert sorted(dict(last.named_parameters())) == held
    assert made.partition.ties == ()


def test_a_parameter_of_another_shape_is_found_on_every_rank(message: Messages) -> None:
    model = Model()
    x = torch.rand(6, 4)
    made = cut(model, ["first"], x)
    model.table = nn.Parameter(torch.rand(3, 4))
    with pytest.raises(GuardError) as caught:
        made.partition.stages[1].module({}, {"first": torch.rand(6, 4)})
    message(caught, "'table' of shape (6, 4)", "(3, 4)")


def test_a_module_above_a_cut_refuses_calls(message: Messages) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model()

        def forward(self, x: Any) -> Any:
            return self.inner(x)

    made = cut(Outer(), ["inner.first"], torch.rand(6, 4))
    with pytest.raises(RuntimeError) as caught:
        made.partition.stages[0].module.get_submodule("inner")(torch.rand(6, 4))
    message(caught, "Model", "above a pipeline cut")
