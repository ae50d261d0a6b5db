"""Run the reference and the scheduled model in one type, phase by phase.

Values are released before the next phase, so that no more than one phase of each model is in memory: of a model
of float32 parameters, no more than 56 bytes a parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from slapo_core.errors import ArgumentError
from slapo_runtime.ranks.world import Attempt
from slapo_verify.compare import Comparison
from slapo_verify.inputs import Batches
from slapo_verify.kinds import EARLY, KINDS, OWN_TYPES
from slapo_verify.phases import Observation, Runner
from slapo_verify.precision import is_inexact
from slapo_verify.receipts import Receipts
from slapo_verify.trials import ReferenceRun, ScheduleTrials


class ReferenceRunError(Exception):
    """Report that the reference model does not run in a type."""

    def __init__(self, attempt: Attempt[Any], *, is_alone: bool) -> None:
        self.failure, self.error, self.is_alone = attempt.failures[0], attempt.error, is_alone
        super().__init__(str(self.failure))

    def refuse(self) -> ArgumentError:
        """Return the error where no other type is left."""
        where = "" if self.is_alone else f", on rank {self.failure.rank}"
        return ArgumentError(
            f"the reference model itself fails on the example inputs{where}: {self.failure}",
            hint="verify(sch, example_inputs) takes what model(...) takes: a mapping, a tuple, or one argument",
        )


class BothModels:
    """Run both models in one type, phase by phase: run, compare, release.

    All ranks create it, and call the same methods in the same order.

    Args:
        trials: runs them.
        dtype: the type; None: the model's own types.
        watches: whether effects are looked for, if the call asks for them.

    Attributes:
        reference: how the reference model ran.
        comparison: this rank's.
        raised: where the scheduled model raised, or None.
        raised_for: the further batch that made it raise, e.g. ``"batch 2"``; "" for the given one.
        notes: what could not be compared.

    Raises:
        ReferenceRunError: on every rank.
    """

    reference: ReferenceRun

    def __init__(self, trials: ScheduleTrials, dtype: torch.dtype | None, *, watches: bool = True) -> None:
        self.trials, self.world, self.dtype = trials, trials.world, dtype
        self.records = trials.copies.schedule.records
        self.comparison = Comparison()
        self.notes: list[str] = []
        self.raised: Attempt[Any] | None = None
        self.raised_for = ""
        self.receipts = Receipts(trials.copies.schedule) if trials.options.effects and watches else None
        self._phases: tuple[str, ...] = EARLY
        self._withheld = self._found = frozenset[str]()  # in the runs of now, and by the scheduled model

    def run(self) -> BothModels:
        """Run all phases that apply to the model, the batch and the schedule."""
        self._run()
        self.reference.seen.values.clear()
        self.reference.phases = self._phases
        return self

    def run_early(self) -> BothModels:
        """Run the phases of outputs, buffers and gradients only."""
        self.reference, _, _ = self._reference(lambda: self.trials.start_reference(self.dtype, self._withheld))
        self._start()
        if self._withholds_more():
            self.run_early()
        self.reference.seen.values.clear()
        return self

    def _run(self) -> None:
        updates = self._reference_first()
        started = self._start()
        if self._withholds_more():
            del started
            self._run()
            return
        if started is None or any(self.world.gather(bool(self.comparison.differences))):
            return  # whatever differs later is a consequence
        runner, other_stream = started
        is_own = self.dtype is None or self.trials.own_dtype(self.trials.copies.reference_model) is self.dtype
        if not is_own and self._add("the model's own types were not compared", OWN_TYPES):
            self._compare_phase(OWN_TYPES)  # right after the first phases, whose numbers tell how much rounding does
        self._release(but="updates")
        if self.raised is None and updates:
            self._compare_phase("updates", runner)
        elif not updates and self.trials.options.optimizer_steps:
            self.notes.append("no optimizer steps were compared, because no parameter has a finite gradient")
        del runner, started
        if self.raised is None:
            self._further_batches()
        differentiable = any(is_inexact(tensor) for _, tensor in self.trials.inputs.tensors())
        if differentiable and self.raised is None and self._add("gradients of the inputs were not compared", "inputs"):
            self._compare_phase("inputs")
        if self.raised is None:
            self._dropout(other_stream)

    # -- phases -----------------------------------------------------------------------------------------------

    def _reference_first(self) -> bool:
        """Run the reference phases first: they need the most memory.

        Return whether there are updates among them.
        """
        self.reference, runner, rate = self._reference(lambda: self.trials.start_reference(self.dtype, self._withheld))
        rate = min(self.world.gather(rate))
        self._set_conditions(learning_rate=rate)
        updates = bool(self.trials.options.optimizer_steps and rate)
        if updates:
            self._reference(lambda: self.trials.add_reference(self.reference, "updates", runner))
        return updates

    def _start(self) -> tuple[Runner, str | None] | None:
        """Run the first phases of the scheduled model, and compare its RNG stream."""
        receipts = self.receipts
        started = self.world.attempt(
            lambda: self.trials.start(self.trials.candidate, self.reference, receipts=receipts)
        )
        if started.failures:
            self.raised = started
            return None
        runner, seen = started.value()
        self._found = self._withheld | self.trials.withheld(seen)
        if self._found == self._withheld:
            self._compare(seen)
            self.notes += dict.fromkeys(note for notes in self.world.gather(seen.notes) for note in notes)
        return runner, self.trials.other_stream(self.trials.candidate, self.reference, seen)

    def _withholds_more(self) -> bool:
        """Return whether the scheduled model withholds more outputs than assumed."""
        more, self._withheld = self._found != self._withheld, self._found
        return more

    def _compare_phase(self, phase: str, runner: Runner | None = None, *, other_stream: bool = False) -> None:
        """Run a phase of the scheduled model and compare it."""
        self._phases = (*dict.fromkeys((*self._phases, phase)),)
        candidate = self.trials.candidate
        ran = self.world.attempt(lambda: self.trials.late(candidate, self.reference, phase, runner))
        self.raised = ran if ran.failures else None
        if self.raised is not None:
            return
        seen = ran.value()
        if phase == "dropout":
            self.trials.share_dropout(candidate, seen, other_stream=other_stream)
            self.notes += self.trials.advice(self.reference, seen)
        self._compare(seen)
        self._release(but="updates" if phase == OWN_TYPES else None)

    def _further_batches(self) -> None:
        """Compare further batches, and variants of the given one.

        All run on one copy, because state that a call keeps shows in the next one.
        """
        given = tuple((f"batch {number}", each) for number, each in enumerate(self.trials.options.more_batches, 2))
        variants, notes = self.trials.inputs.variants(self.trials.copies.reference_model)
        self.notes += notes
        one = self.trials.inputs.of_one()
        ones = (one,) if one is not None else ()
        made: list[Batches] = [each for variant in variants for each in ((variant, *ones), (variant,))[: 1 + len(ones)]]
        held = ""
        for more in (*made, ones, ()):  # the best first
            why = self._compare_batches((*given, *more), is_given=not more)
            if not why:
                break
            note = f"{more[-1][0]} was not compared, because {why}"
            held = note if len(more) == 2 else ""
            self.notes += [] if held else [note]
        self.notes += [held] if held and self.raised is None else []

    def _compare_batches(self, batches: Batches, *, is_given: bool) -> str:
        """Compare the batches; return the reason why a variant was not compared."""
        self._set_conditions(more_batches=batches)
        if not batches:
            return ""
        ran = self.world.attempt(lambda: self.trials.add_reference(self.reference, "batches"))
        if ran.failures and is_given:
            raise ReferenceRunError(ran, is_alone=self.world.is_alone)
        if ran.failures:
            return f"the reference model raises: {ran.failures[0].kind}: {ran.failures[0].text}"
        self._compare_phase("batches")
        raised = self.raised
        if raised is None:
            return ""
        if is_given or self.trials.contradicts_itself(raised):
            self.raised_for = " or ".join(called for called, _ in batches)
            return ""
        self.raised = None
        self._release()
        where = "" if self.world.is_alone else f" on rank {raised.failures[0].rank}"
        return f"the scheduled model raises{where}: {raised.failures[0]}"

    def _dropout(self, other_stream: str | None) -> None:
        drops = bool(self.reference.seen.of("dropout")["forward"])
        if drops and other_stream is not None:
            self.notes.append(f"outputs and gradients with dropout were not compared: {other_stream}")
        if drops or any(record.primitive.equivalence.is_random for record in self.records):
            self._reference(lambda: self.trials.add_reference(self.reference, "dropout"))
            self._compare_phase("dropout", other_stream=other_stream is not None)

    # -- helpers ----------------------------------------------------------------------------------------------

    def _reference(self, function: Callable[[], Any]) -> Any:
        attempt = self.world.attempt(function)
        if attempt.failures:
            raise ReferenceRunError(attempt, is_alone=self.world.is_alone)
        return attempt.value()

    def _add(self, what: str, phase: str) -> bool:
        """Add a phase of the reference model; note it if that does not run."""
        attempt = self.world.attempt(lambda: self.trials.add_reference(self.reference, phase))
        for failure in attempt.failures[:1]:
            self.notes.append(f"{what}, because the reference model raises: {failure.kind}: {failure.text}")
        return not attempt.failures

    def _set_conditions(self, **changed: Any) -> None:
        self.reference.conditions = dataclasses.replace(self.reference.conditions, **changed)

    def _compare(self, seen: Observation) -> None:
        names = self.trials.copies.counterparts
        self.comparison.add(self.trials.compare(self.reference, seen, names, self.records))

    def _release(self, but: str | None = None) -> None:
        values = self.reference.seen.values
        for kind in [each for each in values if each != "dropout" and (but is None or KINDS[each].phase != but)]:
            del values[kind]
