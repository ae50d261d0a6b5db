"""verify runs a cut model stage by stage, whoever cuts it, and says where its stages are wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import slapo_core as slapo
from slapo_core.errors import HookError, TraceError, VerifyError
from slapo_core.plugins import use_registry
from slapo_testing.distributions import FakeEnvironment
from tests.dists.cutting import LIVENESS, batch, cutter, liveness, reader
from tests.messages import Messages

Make = Callable[..., slapo.Schedule]


@pytest.fixture
def cut(fake_distributions: FakeEnvironment) -> Make:
    """A schedule of the reader with cuts after some of its blocks."""
    installed: list[str] = []

    def make(fault: str = "", cuts: tuple[int, ...] = (0, 1), live: str | None = None, **sizes: Any) -> slapo.Schedule:
        other = liveness() if live is None else liveness(source=live)
        if not installed:
            fake_distributions.install(cutter(fault), other)
        installed.append(fault)
        with use_registry(fake_distributions.registry(with_installed=True)):
            schedule = slapo.create_schedule(reader(**sizes), plugins=["cut-slapo", "live-slapo"])
            for number in cuts:
                schedule[f"blocks.{number}"].after()
        return schedule

    return make


def test_a_model_is_verified_stage_by_stage(cut: Make) -> None:
    schedule = cut()
    before = {name: tensor.clone() for name, tensor in schedule.model.state_dict().items()}
    report = slapo.verify(schedule, batch())
    kinds = {entry.kind for entry in report.largest if entry.compared}
    assert kinds >= {"output", "gradient", "buffer", "evaluation output", "parameter", "batch gradient"}
    assert {"input gradient", "gradient with dropout", "own gradient"} <= kinds
    assert not report.not_compared
    assert all(torch.equal(before[name], tensor) for name, tensor in schedule.model.state_dict().items())
    calls = sys.modules["cut_hooks"].CALLS
    forms = [tuple(sorted(call[1].items())) for call in calls]
    assert {len(dict(form)["ids"]) for form in forms} == {2}
    assert {dict(form)["ids"][0] for form in forms} == {1, 4, 8}, "other sizes of a batch are other forms"
    assert any("scale" not in dict(form) for form in forms), "an argument that is left out is another form"
    assert {call[0] for call in calls} == {True, False}
    # Three stages of one copy run training, evaluation and all optimizer steps: two modes, two forms of each; those of
    # a second copy, whose constants are drawn, run training.
    assert len(calls) <= 18, calls


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("no gradient", ["gradient of ", "#2 after() at 'blocks.1'", "without a gradient: 'hidden1'"]),
        ("swap", ["first in output", "#1 after() at 'blocks.0'", "at 'blocks.1' in stage 1: it gets"]),
        ("stale", ["buffer norm.running_mean", "#2 after() at 'blocks.1'", "'norm' in stage 2: "]),
        ("forgets", ["KeyError", "in stage 1 (up to 'blocks.1')"]),
    ],
)
def test_wrong_stages_are_found_and_blamed_on_the_cut(cut: Make, fault: str, says: list[str]) -> None:
    schedule = cut(fault)
    schedule["blocks.2.fc"].annotate("weight", "seen", True)  # an innocent step
    with pytest.raises(VerifyError) as caught:
        slapo.verify(schedule, batch())
    text = str(caught.value)
    for part in says:
        assert part in text, text
    assert "without the cuts" in text
    assert "from cut-slapo 1.0 (slapo_partition)" in text
    assert "from live-slapo 1.0 (slapo_liveness)" in text
    assert caught.value.plugin == "cut-slapo 1.0"
    assert all("after()" in step for step in caught.value.steps)


WRONG_LIVENESS = {
    None: None,
    "too little": LIVENESS.replace("max(value.consumers", "min(value.consumers"),
    "another": LIVENESS.replace("last if name in outputs else", "last if name in outputs or name == 'hidden0' else"),
    "later": LIVENESS.replace("value.producer <= at", "value.producer <= at + 1"),
    "a list": LIVENESS.replace("Liveness(tuple(", "list(tuple("),
}


@pytest.mark.parametrize(
    ("fault", "live", "words"),
    [
        ("no tie", None, ("slapo_partition", "'embed.weight'", "tie")),
        ("elsewhere", None, ("slapo_partition", "stage 0", "'blocks.1'")),
        ("wrong shape", None, ("stage 0 (up to 'blocks.0')", "'keep' is (4, 5) ")),
        ("runs", None, ("'norm.running_mean', 'norm.running_var', 'norm.num_batches_tracked'",)),
        ("draws", None, ("RNG state", "slapo_partition")),
        ("", "too little", ("slapo_liveness", "stage 2 reads 'keep'")),
        ("", "later", ("slapo_liveness", "stage 0 sends 'hidden1'")),
        ("", "a list", ("slapo_liveness", "a list")),
    ],
)
def test_invalid_stages_are_refused_with_their_plugin(
    cut: Make, fault: str, live: str | None, words: tuple[str, ...], message: Messages
) -> None:
    with pytest.raises(HookError) as caught:
        slapo.verify(cut(fault, live=WRONG_LIVENESS[live]), batch())
    message(caught, "cut-slapo 1.0" if live is None else "live-slapo 1.0", *words)


def test_value_sent_beyond_its_last_reader_is_accepted(cut: Make) -> None:
    assert slapo.verify(cut(live=WRONG_LIVENESS["another"]), batch(), optimizer_steps=0).optimizer_steps == 0


def test_a_model_that_cannot_be_cut_there_is_refused_as_the_plugin_says(cut: Make, message: Messages) -> None:
    with pytest.raises(TraceError) as caught:
        slapo.verify(cut("refuses"), batch())
    message(caught, "'blocks.0'", "nobody knows why")
    assert caught.value.path == "blocks.0"


def test_module_state_does_not_pass_a_cut(cut: Make) -> None:
    """In one process a later stage would find it, in another one not: a run that trains, wrongly."""
    assert slapo.verify(cut(cuts=(), talks=True), batch(), optimizer_steps=0)
    with pytest.raises(VerifyError) as caught:
        slapo.verify(cut(talks=True), batch())
    text = str(caught.value)
    assert "first in output" in text
    assert "without the cuts" in text
    assert "at 'blocks.1' in stage 1: it gets the same inputs" in text


def test_stage_writes_do_not_reach_other_stages_arguments(cut: Make) -> None:
    """Every stage reads its own batch; that the model changes its argument in place does not pass the cut."""
    assert slapo.verify(cut(cuts=(), writes=True), batch(), optimizer_steps=0)
    with pytest.raises(VerifyError, match="without the cuts"):
        slapo.verify(cut(writes=True), batch())


def test_stages_that_depend_on_more_than_model_and_schedule_are_refused(cut: Make) -> None:
    with pytest.raises(HookError, match="copy of the same model"):
        slapo.verify(cut("other names"), batch())


def test_input_signature_without_stages_is_noted(cut: Make, message: Messages) -> None:
    report = slapo.verify(cut("refuses large"), batch(), optimizer_steps=0)
    for note, size in zip(report.notes, ("a batch of 8 without scale ", "a batch of 8 "), strict=True):
        message(note, size, "TraceError: cannot cut a large batch")
    assert {entry.kind for entry in report.largest} >= {"batch output", "input gradient"}  # the batch of one
    with pytest.raises(TraceError, match="cannot cut a large batch"):
        slapo.verify(cut("refuses large"), batch(), more_batches=[batch(6)], optimizer_steps=0)


def test_a_wrong_step_is_blamed_as_without_cuts(cut: Make) -> None:
    """The same words but for the number of the step: a right cut is not in the way of the search."""
    told = []
    for cuts in ((), (0, 1)):
        schedule = cut(cuts=cuts)
        schedule["blocks.2.fc"].replace(torch.nn.Linear(4, 4), drop=("weight", "bias"))
        with pytest.raises(VerifyError) as caught:
            slapo.verify(schedule, batch())
        told.append(str(caught.value).replace(f"#{len(cuts) + 1} ", "#N "))
    assert told[0] == told[1]
    assert "#N replace" in told[0]


def test_a_buffer_that_one_stage_changes_and_another_holds_is_refused(cut: Make, message: Messages) -> None:
    """In one process both see the change; in two the other has a copy that stays as it was."""
    with pytest.raises(HookError) as caught:
        slapo.verify(cut("shared norm"), batch())
    stage = "stage 0 (up to 'blocks.0'), made by cut-slapo 1.0"
    message(caught, stage, "'norm.running_mean'", "'norm.running_var'", "the stages 0, 2")
