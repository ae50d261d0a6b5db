"""Both models in turn, stage by stage: run, compare, and let go of what was compared.

So no more than one stage of each is in memory: of a model of float32 parameters, no more than 56 bytes a parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.errors import ArgumentError
from slapo_core.ranks.world import Attempt, Failure, World
from slapo_core.verification.compare import Comparison
from slapo_core.verification.inputs import Inputs
from slapo_core.verification.passes import Conditions
from slapo_core.verification.precision import own_dtype
from slapo_core.verification.run import EARLY, OWN_TYPES, STAGE_OF_KIND, Course, Observation
from slapo_core.verification.trials import Ran, Subject, Trials, reraise
from slapo_core.verification.untouched import Batches, UntouchedRun, UntouchedRuns

if TYPE_CHECKING:
    from slapo_core.spec.record import Record

__all__ = ["Turned", "Turns", "UntouchedRunError"]


class UntouchedRunError(Exception):
    """The untouched model does not run in some type, so nothing can be compared there.

    Args:
        failure: of the first rank.
        error: this rank's own, if it has one.
        is_alone: whether there is one rank only.
    """

    def __init__(self, failure: Failure, error: BaseException | None, *, is_alone: bool) -> None:
        super().__init__(str(failure))
        self.failure, self.error, self.is_alone = failure, error, is_alone

    def refuse(self) -> ArgumentError:
        """What to raise where there is no other type left."""
        where = "" if self.is_alone else f", on rank {self.failure.rank}"
        return ArgumentError(
            f"the untouched model itself fails on the example inputs{where}: {self.failure}",
            hint="verify(sch, example_inputs) takes what model(...) takes: a mapping, a tuple, or one argument",
        )


@dataclass
class Turned:
    """What came of running both models in one type.

    Args:
        reference: how the untouched one ran; without what it gave.
        comparison: this rank's.
        raised: where the scheduled one raised, or None.
        notes: what could not be compared.
        raised_for: the further batches of which one made it raise, e.g. ``"batch 2"``; "" for the given one.
    """

    reference: UntouchedRun
    comparison: Comparison
    raised: Attempt[Any] | None = None
    notes: tuple[str, ...] = ()
    raised_for: str = ""


class Turns:
    """All ranks make it alike, and call :meth:`run` in the same order.

    Args:
        world: the ranks.
        runs: runs the untouched model.
        trials: runs the scheduled one, and compares.
        subject: the scheduled model.
        records: the steps of its schedule.
    """

    def __init__(
        self, world: World, runs: UntouchedRuns, trials: Trials, subject: Subject, records: Sequence[Record]
    ) -> None:
        self.world, self.runs, self.trials, self.subject, self.records = world, runs, trials, subject, records

    def run(self, dtype: torch.dtype | None) -> Turned:
        """Run both in ``dtype``; None: in the model's own types.

        Raises:
            UntouchedRunError: on every rank.
        """
        return _Turn(self).run(dtype)

    def run_early(self, dtype: torch.dtype | None) -> Turned:
        """As :meth:`run`, outputs, buffers and gradients only."""
        return _Turn(self).run_early(dtype)


class _Turn:
    """The stages in one type."""

    def __init__(self, turns: Turns) -> None:
        self.world, self.runs, self.trials = turns.world, turns.runs, turns.trials
        self.subject, self.records = turns.subject, turns.records
        self.comparison = Comparison()
        self.notes: list[str] = []
        self.raised_for = ""

    def run(self, dtype: torch.dtype | None) -> Turned:
        updates = self._untouched_first(dtype)
        started = self.world.attempt(lambda: self.trials.start(self.subject, self.reference))
        if started.failures:
            return self._outcome(started)
        ours, seen = started.value()
        del started
        self._compare(seen)
        if any(self.world.gather(bool(self.comparison.differences))):
            return self._outcome()  # whatever differs later is a consequence
        draws = bool(self.reference.seen.of("dropout")["forward"])
        is_random = any(record.primitive.equivalence.is_random for record in self.records)
        reason = self.trials.other_stream(self.subject, self.reference, seen) if draws or is_random else None
        del seen
        raised = self._own_types(dtype)
        self._release(but="updates")
        if raised is None and updates:
            raised = self._candidate("updates", ours)
        elif updates:
            self.reference.stages = tuple(stage for stage in self.reference.stages if stage != "updates")
        elif self.runs.optimizer_steps:
            self.notes.append("no optimiser steps were compared, because no parameter has a finite gradient")
        del ours
        if raised is None:
            raised = self._on_fresh_copies(draws, is_random, reason)
        return self._outcome(raised)

    def run_early(self, dtype: torch.dtype | None) -> Turned:
        self.reference, _, _ = self._untouched(lambda: self.runs.start(dtype))
        started = self.world.attempt(lambda: self.trials.start(self.subject, self.reference))
        if started.failures:
            return self._outcome(started)
        self._compare(started.value()[1])
        return self._outcome()

    def _untouched_first(self, dtype: torch.dtype | None) -> bool:
        """The stages on one copy, before there is a copy of the scheduled model: nothing else needs as much memory.

        Gives whether there are updates among them.
        """
        self.reference, course, rate = self._untouched(lambda: self.runs.start(dtype))
        rate = min(self.world.gather(rate))
        self._set_conditions(learning_rate=rate)
        updates = bool(self.runs.optimizer_steps and rate)
        if updates:
            self._untouched(lambda: self.runs.add(self.reference, "updates", course))
        return updates

    def _on_fresh_copies(self, draws: bool, is_random: bool, reason: str | None) -> Attempt[Any] | None:
        """The stages that go on with no copy.

        Args:
            draws: whether the untouched model drops.
            is_random: whether a step draws other random numbers.
            reason: why dropout gets other random numbers, if it draws any.
        """
        raised = self._further_batches() or self._input_gradients()
        if raised is None and (draws or is_random):
            if reason is not None and draws:
                self.notes.append(f"outputs and gradients with dropout were not compared: {reason}")
            raised = self._stage("dropout", other_stream=reason is not None)
        return raised

    # -- stages -----------------------------------------------------------------------------------------------

    def _stage(self, stage: str, *, other_stream: bool = False) -> Attempt[Any] | None:
        """A stage of both, compared; gives the scheduled model's failure."""
        self._untouched(lambda: self.runs.add(self.reference, stage))
        return self._candidate(stage, other_stream=other_stream)

    def _candidate(self, stage: str, ours: Course | None = None, *, other_stream: bool = False) -> Attempt[Any] | None:
        def run() -> Observation:
            return self.trials.late(self.subject, self.reference, stage, ours, other_stream=other_stream)

        ran = self.world.attempt(run)
        if ran.failures:
            return ran
        seen = ran.value()
        if stage == "dropout":
            self.trials.share(seen)
            self.notes += self.trials.advice(self.subject, self.reference, seen)
        self._compare(seen)
        self._release(but="updates" if stage == OWN_TYPES else None)
        return None

    def _own_types(self, dtype: torch.dtype | None) -> Attempt[Any] | None:
        """Right after the first stages, whose numbers tell how much rounding does."""
        inputs = (tensor for _, tensor in self.runs.inputs.tensors())
        if dtype is None or own_dtype(self.runs.subjects.untouched, inputs) is dtype:
            return None
        attempt = self.world.attempt(lambda: self.runs.add(self.reference, OWN_TYPES))
        if attempt.failures:
            self._note("the model's own types were not compared", attempt.failures[0])
            return None
        return self._candidate(OWN_TYPES)

    def _further_batches(self) -> Attempt[Any] | None:
        """The user's batches, and those made of the given one where both models run: raising is not silent."""
        choices, one, notes = self.runs.further_batches()
        self.notes += notes
        for batches, variant in choices:
            failure = self._untouched_on(batches, one)
            if failure is not None and one is not None:
                with_one, failure = failure, self._untouched_on(batches)
                if failure is None:
                    self._note(f"{one[0]} was not compared", with_one.failures[0])
                    one = None
            if failure is None:
                raised = self._candidate_on(batches, one)
                if raised is None or not variant or self.trials.contradicts_itself(raised):
                    self.raised_for = " or ".join(called for called, _ in batches) if raised is not None else ""
                    return raised
                self._note_raising(variant, raised)
                self._release()
                continue
            if not variant:
                raise UntouchedRunError(failure.failures[0], failure.error, is_alone=self.world.is_alone)
            self._note(f"{variant} was not compared", failure.failures[0])
        return None

    def _untouched_on(self, batches: Batches, one: tuple[str, Inputs] | None = None) -> Attempt[Any] | None:
        """Run the untouched model on further batches, if there are any; gives its failure."""
        batches = batches if one is None else (*batches, one)
        self._set_conditions(more_batches=batches)
        if not batches:
            return None
        attempt = self.world.attempt(lambda: self.runs.add(self.reference, "batches"))
        return attempt if attempt.failures else None

    def _candidate_on(self, batches: Batches, one: tuple[str, Inputs] | None) -> Attempt[Any] | None:
        if not batches and one is None:
            return None
        raised = self._candidate("batches")
        if raised is None or one is None or self.trials.contradicts_itself(raised):
            return raised
        self._release()
        failure = self._untouched_on(batches)
        assert failure is None, failure  # it has just run on them
        again = self._candidate("batches") if batches else None
        if again is None:
            self._note_raising(one[0], raised)
        return again

    def _input_gradients(self) -> Attempt[Any] | None:
        if not self.runs.is_differentiable():
            return None
        attempt = self.world.attempt(lambda: self.runs.add(self.reference, "inputs"))
        if attempt.failures:  # a model need not be differentiable in its inputs
            self._note("gradients of the inputs were not compared", attempt.failures[0])
            return None
        return self._candidate("inputs")

    # -- what they share --------------------------------------------------------------------------------------

    def _untouched(self, function: Callable[[], Any]) -> Any:
        attempt = self.world.attempt(function)
        if attempt.failures:
            raise UntouchedRunError(attempt.failures[0], attempt.error, is_alone=self.world.is_alone)
        return attempt.value()

    def _set_conditions(self, **changed: Any) -> None:
        conditions: Conditions = dataclasses.replace(self.reference.conditions, **changed)
        self.reference = dataclasses.replace(self.reference, conditions=conditions)

    def _compare(self, seen: Observation) -> None:
        ran = Ran(seen, self.subject.counterparts)
        compared = self.world.attempt(lambda: self.trials.compare(self.reference, ran, self.records))
        reraise(compared)
        self.comparison.add(compared.value())

    def _release(self, but: str | None = None) -> None:
        values = self.reference.seen.values
        for kind in [kind for kind in values if kind != "dropout" and (but is None or STAGE_OF_KIND[kind] != but)]:
            del values[kind]

    def _note(self, what: str, failure: Failure) -> None:
        self.notes.append(f"{what}, because the untouched model raises: {failure.kind}: {failure.text}")

    def _note_raising(self, batch: str, raised: Attempt[Any]) -> None:
        first = raised.failures[0]
        where = "" if self.world.is_alone else f" on rank {first.rank}"
        self.notes.append(f"{batch} was not compared, because the scheduled model raises{where}: {first}")

    def _outcome(self, raised: Attempt[Any] | None = None) -> Turned:
        self.reference.seen.values.clear()
        ran = self.reference.stages
        self.reference.stages = tuple(stage for stage in (*EARLY, *_LATE) if stage in ran)
        return Turned(self.reference, self.comparison, raised, tuple(self.notes), self.raised_for)


_LATE = ("batches", "inputs", "updates", "dropout", OWN_TYPES)
