"""What a primitive changes while it is applied: only by its edit, and only what is in the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_testing.snapshot import ModelSnapshot
from tests.messages import Messages
from tests.support.edits import Call, HookAll, post_hook, wrapped

EDITS: dict[str, Callable[[Any, Any], Any]] = {
    "set_parameter": lambda node, edit: edit.set_parameter(node, "weight", torch.zeros(2, 4)),
    "set_buffer": lambda node, edit: edit.set_buffer(node, "seen", torch.zeros(2)),
    "set_requires_grad": lambda node, edit: edit.set_requires_grad(node, "weight", False),
    "set_layout": lambda node, edit: edit.set_layout(node, "weight", slapo.Layout("0.1.weight", (4, 4))),
    "replace_module": lambda node, edit: edit.replace_module(node, nn.Identity()),
    "add_hook": lambda node, edit: edit.add_hook(node, "forward", post_hook),
    "add_hook, inactive": lambda node, edit: edit.add_hook(node, "forward", post_hook, active=False),
    "wrap_forward": lambda node, edit: edit.wrap_forward(node, wrapped),
    "set_attribute": lambda node, edit: edit.set_attribute(node, "out_features", 2),
    "annotate": lambda node, edit: edit.annotate(node, "weight", "key", 1),
    "looking": lambda node, edit: node.parameters,
}


@pytest.mark.parametrize("kind", EDITS)
def test_a_child_that_the_same_primitive_replaced_cannot_be_edited(kind: str, message: Messages) -> None:
    model = nn.Sequential(nn.Sequential(nn.ReLU(), nn.Linear(4, 4)), nn.ReLU())
    sch = slapo.create_schedule(model, mesh={"tp": 1})
    child = sch["0.1"]
    assert isinstance(child.module, nn.Linear)  # known to the node, and gone a moment later

    def replace_and_edit(node: slapo.Node, edit: slapo.Edit) -> None:
        edit.replace_module(node, nn.Identity(), dropped=["1.weight", "1.bias"])
        EDITS[kind](child, edit)

    before = ModelSnapshot(model)
    with pytest.raises(slapo.ApplyError) as refused:
        sch["0"].apply(Call(replace_and_edit))
    message(refused, "'0.1'", "replaced '0'")
    assert refused.value.path == "0.1"
    assert before.differences(model) == []
    assert sch.records == ()
    sch["0.1"].apply(HookAll())  # which is there again


def test_replacement_can_be_edited() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
    sch = slapo.create_schedule(model)
    new = nn.Sequential(nn.Linear(4, 4))

    def replace_and_edit(node: slapo.Node, edit: slapo.Edit) -> None:
        edit.replace_module(node, new)
        edit.set_attribute(node, "own", 1)
        edit.set_attribute(node["0"], "own", 2)

    sch["0"].apply(Call(replace_and_edit))
    assert (new.own, new[0].own) == (1, 2)


@pytest.mark.parametrize(
    "step",
    [
        lambda sch: sch["1"].apply(HookAll()),
        lambda sch: sch["*"].apply(HookAll()),
        lambda sch: sch.undo(),
        lambda sch: sch.undo(to=0),
        lambda sch: sch.seal(),
    ],
    ids=["apply", "apply to a group", "undo", "undo all", "seal"],
)
def test_a_schedule_changes_no_more_while_a_primitive_is_applied(
    step: Callable[[slapo.Schedule], Any], message: Messages
) -> None:
    """Records in another order than the edits would let undo leave a wrong tensor."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = ModelSnapshot(model)
    sch = slapo.create_schedule(model)
    sch["0"].apply(HookAll())
    after_one = ModelSnapshot(model)

    def reenter(node: slapo.Node, edit: slapo.Edit) -> None:
        edit.set_parameter(node, "weight", nn.Parameter(torch.zeros(2, 2)))
        step(sch)

    with pytest.raises(slapo.ApplyError) as refused:
        sch["0"].apply(Call(reenter))
    message(refused, "while a primitive is being applied", ".apply(other_node, edit)")
    assert [record.index for record in sch.records] == [1]
    assert after_one.differences(model) == []
    sch.undo(to=0)
    assert before.differences(model) == []


@dataclass(frozen=True)
class Reentering(slapo.Primitive):
    """Apply another primitive through the schedule where a primitive is only asked.

    rewrite: x -> x
    """

    name = "test.reentering"
    equivalence = slapo.Equivalence.EXACT
    schedule: Any = None

    def preconditions(self, node: slapo.Node) -> Iterator[slapo.Violation]:
        self.schedule["1"].apply(HookAll())
        return iter(())

    def apply(self, node: slapo.Node, edit: slapo.Edit) -> None:
        edit.note("applied")


def test_preconditions_apply_nothing() -> None:
    """Two records would have the same index."""
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with pytest.raises(slapo.ApplyError, match="while a primitive is being applied"):
        sch["0"].apply(Reentering(sch))
    assert sch.records == ()
    sch["0"].apply(HookAll())
    assert [record.index for record in sch.records] == [1]


@pytest.mark.parametrize("asked", ["node", "schedule"])
def test_the_reference_model_can_be_asked_for_in_the_middle_of_an_edit(asked: str) -> None:
    """The edits made so far are as they were afterwards, though an earlier step changed the same place."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    reference = model[0]
    sch = slapo.create_schedule(model, example_inputs=torch.ones(1, 2))
    sch["0"].apply(Call(lambda node, edit: edit.replace_module(node, nn.Linear(2, 3))))
    second = nn.Linear(2, 3)

    def ask(node: slapo.Node, edit: slapo.Edit) -> None:
        edit.replace_module(node, second)
        edit.set_attribute(node.parent, "factor", 2)
        with sch["0"].reference() if asked == "node" else sch.reference() as found:
            assert (found if asked == "node" else found[0]) is reference
            assert not hasattr(model, "factor")
            with pytest.raises(slapo.ApplyError, match="over"):
                edit.set_attribute(node.parent, "factor", 3)

    before = ModelSnapshot(model)
    sch["0"].apply(Call(ask))
    assert (model[0], model.factor) == (second, 2)
    sch.undo()
    assert before.differences(model) == []
