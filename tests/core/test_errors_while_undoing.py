"""Where undo, rollback or the end of ``sch.reference()`` meet an error, the rest goes on, and the state is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.errors import UndoError
from slapo_core.internals import journal
from slapo_testing import ModelSnapshot, assert_bit_identical
from slapo_testing.models import MLP
from tests.messages import Messages
from tests.support.edits import Call


class Stubborn(journal.JournalEntry):
    """An edit that fails where it is told to."""

    def __init__(self, *fails: str) -> None:
        self.fails = fails

    def redo(self) -> None:
        self._maybe("redo")

    def undo(self) -> None:
        self._maybe("undo")

    def describe(self) -> str:
        return "a stubborn edit"

    def _maybe(self, what: str) -> None:
        if what in self.fails:
            raise RuntimeError("not today")


def _change(*edits: journal.JournalEntry, error: Exception | None = None) -> Call:
    """Change the weights of two layers, with ``edits`` between, and raise ``error``."""

    def apply(node: slapo.Node, edit: slapo.Edit) -> None:
        edit.set_parameter(node["0"], "weight", torch.zeros(2, 2))
        for entry in edits:
            edit._do(node, entry)
        edit.set_parameter(node["1"], "weight", torch.zeros(2, 2))
        if error is not None:
            raise error

    return Call(apply)


def _error(call: Callable[[], Any]) -> UndoError:
    with pytest.raises(UndoError) as caught:
        call()
    return caught.value


@pytest.fixture
def sch() -> slapo.Schedule:
    return slapo.create_schedule(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


def test_rollback_takes_back_what_it_can_and_names_the_rest(sch: slapo.Schedule, message: Messages) -> None:
    before = ModelSnapshot(sch.model)
    error = _error(lambda: sch.apply(_change(Stubborn("undo"), error=ValueError("the cause"))))
    message(error, "failed at the root (ValueError)", "1 of its 3 edits", "not as before", "a stubborn edit")
    assert "rolled back" not in str(error)
    assert str(error.__cause__) == "the cause"
    assert_bit_identical(before, sch.model)
    assert sch.records == ()
    sch.apply(_change())


def test_step_that_cannot_be_undone_stays_in_force(sch: slapo.Schedule, message: Messages) -> None:
    before, stubborn = ModelSnapshot(sch.model), Stubborn("undo")
    sch.apply(_change(stubborn))
    sch["1"].annotate("weight", "key", 1)
    with_step = ModelSnapshot(sch.model)
    message(_error(lambda: sch.undo(to=0)), "#1 call(", "stays in force", "RuntimeError: not today")
    assert [record.index for record in sch.records] == [1]
    sch["1"].annotate("weight", "key", 1)
    assert_bit_identical(with_step, sch.model)
    stubborn.fails = ()
    sch.undo(to=0)
    assert_bit_identical(before, sch.model)


def test_a_step_that_can_be_neither_undone_nor_put_back_says_so(sch: slapo.Schedule, message: Messages) -> None:
    late = Stubborn()
    sch.apply(_change(Stubborn("undo"), late))
    late.fails = ("redo",)
    message(_error(sch.undo), "partly in force", "undo failed", "a stubborn edit", "fresh model")


@pytest.mark.parametrize("nested", [False, True])
def test_leaving_the_reference_ends_the_schedule_before_a_step_that_cannot_be_redone(
    sch: slapo.Schedule, message: Messages, nested: bool
) -> None:
    sch["0"].annotate("weight", "key", 1)
    with_first, stubborn = ModelSnapshot(sch.model), Stubborn()
    sch.apply(_change(stubborn))
    sch["1"].annotate("weight", "key", 1)

    def leave() -> None:
        with sch.rewound(3 if nested else 0), sch.reference():
            stubborn.fails = ("redo",)

    message(_error(leave), "#2 call(", "cannot be redone", "1 of 3 steps in force")
    assert_bit_identical(with_first, sch.model)
    assert [record.index for record in sch.records] == [1]
    sch["1"].annotate("weight", "other", 1)
    sch.undo(to=0)
    assert not hasattr(sch.model, "_slapo_steps")


def test_edits_that_cannot_be_made_again_after_the_reference_are_named(sch: slapo.Schedule, message: Messages) -> None:
    stubborn, before = Stubborn(), ModelSnapshot(sch.model)

    def apply(node: slapo.Node, edit: slapo.Edit) -> None:
        edit.set_parameter(node["0"], "weight", torch.zeros(2, 2))
        edit._do(node, stubborn)
        edit.set_parameter(node["1"], "weight", torch.zeros(2, 2))
        with node.schedule.reference():
            stubborn.fails = ("redo",)

    message(_error(lambda: sch.apply(Call(apply))), "1 of 3 edits could not be redone", "a stubborn edit")
    assert_bit_identical(before, sch.model)


def test_guards_that_raise_are_left_out_and_the_step_counts(sch: slapo.Schedule) -> None:
    class Guards:
        def follow(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("not today")

    sch._core.history.guards = (Guards(), *sch._core.history.guards)
    with pytest.warns(UserWarning, match=r"Guards raised RuntimeError: not today"):
        sch["0"].annotate("weight", "key", 1)
    with sch.reference():
        pass
    assert len(sch.undo()) == 1


def test_replay_onto_steps_that_cannot_be_saved_adds_all_of_its_own(recwarn: pytest.WarningsRecorder) -> None:
    saved = slapo.create_schedule(MLP())
    saved["head"].annotate("weight", "key", 1)
    saved._core.mark_verified()
    sch = slapo.create_schedule(MLP())
    sch["head"].replace(lambda old: nn.Linear(8, 4))
    slapo.replay(sch, saved.document())
    assert len(sch.records) == 2
    assert not sch.is_verified
    assert not recwarn


@pytest.mark.filterwarnings("error")
def test_a_replay_whose_warning_is_an_error_takes_its_steps_back() -> None:
    saved = slapo.create_schedule(MLP(2))
    saved["layers.*.0"].checkpoint()
    model = MLP(4)
    before = ModelSnapshot(model)
    with pytest.raises(UserWarning, match="none for 2, 3"):
        slapo.replay(model, saved.document())
    assert_bit_identical(before, model)
