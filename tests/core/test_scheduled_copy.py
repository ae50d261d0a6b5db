"""A schedule is read on a copy of its model: the same steps, layouts, calls and state, and neither model changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.internals import Internals, ScheduledCopy
from slapo_core.layout import Layout


def same_output(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    return output


@dataclass(frozen=True)
class Halve(slapo.Primitive):
    """Keep the first two rows of the weight, with a hook and a state."""

    name = "test.halve"
    equivalence = slapo.Equivalence.EXACT

    def apply(self, node: slapo.Node, edit: slapo.Edit) -> None:
        weight = node.parameters["weight"]
        layout = Layout("0.weight", tuple(weight.shape))
        edit.set_parameter(node, "weight", nn.Parameter(weight.detach()[:2].clone()), layout=layout)
        edit.add_hook(node, "forward", same_output)
        edit.set_state(node, "test.halved", True)


@pytest.fixture
def sch() -> slapo.Schedule:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(3, 3)))
    sch["0"].apply(Halve())
    sch["2"].checkpoint()
    return sch


def test_copy_has_the_steps_layouts_calls_and_state_of_its_own_modules(sch: slapo.Schedule) -> None:
    model = copy.deepcopy(sch.model)
    copied = ScheduledCopy(sch, model)
    assert copied.records == sch.records
    assert copied["0"].module is model[0]
    for path in ("0", "1", "2"):
        assert copied[path].hooks == sch[path].hooks
        assert copied[path].wrappers == sch[path].wrappers
        assert copied[path].state == sch[path].state
        for name in sch[path].parameters:
            assert copied[path].layout(name) == sch[path].layout(name)
    assert copied["0"].state["test.halved"]
    tensors = Internals(copied).tree.tensors
    assert tensors.is_known(model[0].weight)
    assert list(tensors.changed()) == ["0.weight"]
    assert tensors.layout(model[2].weight, "2.weight") == Layout("2.weight", (3, 3))


def test_later_steps_do_not_reach_the_copy(sch: slapo.Schedule) -> None:
    copied = ScheduledCopy(sch, copy.deepcopy(sch.model))
    sch["1"].checkpoint()
    sch["0"].annotate("bias", "kept", True)
    assert not copied["1"].wrappers
    assert len(sch["1"].wrappers) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda copied: copied["1"].checkpoint(),
        lambda copied: copied["*"].checkpoint(),
        lambda copied: copied.undo(),
        lambda copied: copied.seal(),
    ],
)
def test_copy_refuses_changes(sch: slapo.Schedule, change: Callable[[slapo.Schedule], Any]) -> None:
    copied = ScheduledCopy(sch, copy.deepcopy(sch.model))
    with pytest.raises(slapo.ApplyError, match="read-only copy of the scheduled model"):
        change(copied)
    assert len(sch.records) == 2
    assert not sch.is_sealed


def test_reference_of_a_copy_is_the_reference_model(sch: slapo.Schedule) -> None:
    copied = ScheduledCopy(sch, copy.deepcopy(sch.model))
    with copied.reference() as model:
        assert model is sch.model
        assert model[0].weight.shape == (4, 3)
    assert sch.model[0].weight.shape == (2, 3)


def test_a_copy_before_the_first_step_knows_all_tensors() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    sch = slapo.create_schedule(model)
    copied = ScheduledCopy(sch, copy.deepcopy(model))
    for name, tensor in copied.model.state_dict(keep_vars=True).items():
        assert Internals(copied).tree.tensors.layout(tensor, name) == Layout(name, tuple(tensor.shape))
    assert isinstance(copied.model[0].weight, torch.Tensor)
