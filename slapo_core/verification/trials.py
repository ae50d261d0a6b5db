"""Run the scheduled model, or parts of its schedule, and see whether it fails, and in the same way."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.errors import VerifyError
from slapo_core.ranks.world import Attempt, Failure, World
from slapo_core.spec.equivalence import Equivalence
from slapo_core.verification.blame import Blame, Outcome, find_steps
from slapo_core.verification.compare import Comparison, compare, drawn_alike
from slapo_core.verification.counterparts import Counterparts
from slapo_core.verification.inputs import Inputs
from slapo_core.verification.run import EARLY, KINDS, STAGE_OF_KIND, Observation, run_stages
from slapo_core.verification.subjects import Subjects
from slapo_core.verification.tolerance import Tolerance
from slapo_core.verification.untouched import UntouchedRun
from slapo_core.verification.values import Difference
from slapo_core.weights.correspondence import Correspondence

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule
    from slapo_core.spec.record import Record

__all__ = ["Failed", "OtherRankError", "Ran", "Subject", "Trials", "first_difference", "reraise", "stages_for"]


@dataclass(frozen=True)
class Subject:
    """A scheduled model to run: its schedule, what its tensors stand for, and what makes fresh copies of it."""

    schedule: Schedule
    counterparts: Counterparts
    make: Callable[[], nn.Module]


@dataclass(frozen=True)
class Ran:
    """What a scheduled model gave on this rank, and what could not be run."""

    seen: Observation
    counterparts: Counterparts
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failed:
    """In which way a schedule fails: a part of it is to blame only if it fails in the same way.

    Args:
        kind: of the first difference, or the type of the exception.
        place: the tensor's name, or the line that raised; blocks of a repeated one count as the same.
        raises: whether it is an exception.
    """

    kind: str
    place: str
    raises: bool = False

    @classmethod
    def by(cls, found: Difference) -> Failed:
        return cls(found.kind, re.sub(r"(?<![^.])\d+(?![^.])", "*", found.name))

    @classmethod
    def with_exception(cls, failure: Failure) -> Failed:
        return cls(failure.kind, failure.where, raises=True)


def stages_for(kind: str) -> tuple[str, ...]:
    """The stages in which a difference of this kind shows, and those that must agree before it counts as the first."""
    stage = STAGE_OF_KIND[kind]
    return EARLY[: EARLY.index(stage) + 1] if stage in EARLY else (EARLY[0], stage)


def first_difference(world: World, shared: Sequence[Comparison]) -> tuple[int, Difference] | None:
    """Of the ranks that found one, the earliest kind decides: later ones are consequences."""
    firsts = [
        (rank, comparison.differences[0])
        for rank, comparison in zip(world.ranks, shared, strict=True)
        if comparison.differences
    ]
    return min(firsts, key=lambda item: (KINDS.index(item[1].kind), item[0]), default=None)


class OtherRankError(VerifyError):
    """Another rank raises an error of its own, which need not be a VerifyError, and ends with it."""


def reraise(attempt: Attempt[Any]) -> None:
    """Raise what a rank raised before anything ran: its own error, or the first one of the others."""
    if not attempt.failures:
        return
    if attempt.error is not None:
        raise attempt.error
    first = attempt.failures[0]
    raise OtherRankError(f"rank {first.rank} could not start: {first}", rank=first.rank)


@dataclass(frozen=True)
class Trials:
    """Runs what is verified, and parts of it; all ranks call the same methods, in the same order.

    Args:
        world: the ranks.
        inputs: one batch.
        subjects: gives copies.
        rtol: the user's; None if it follows from type and promise.
        atol: the user's; None likewise.
    """

    world: World
    inputs: Inputs
    subjects: Subjects
    rtol: float | None
    atol: float | None

    def run(self, subject: Subject, reference: UntouchedRun, stages: Sequence[str]) -> Attempt[Ran]:
        """Run ``stages`` of a scheduled model under the conditions of the untouched one."""
        conditions = dataclasses.replace(reference.conditions, adapt_output=_output_adapter(subject.schedule))
        early = [stage for stage in stages if stage in EARLY]
        late = [stage for stage in stages if stage not in EARLY]
        started = self.world.attempt(
            lambda: run_stages(subject.make(), self.inputs, conditions, early) if early else Observation()
        )
        if started.failures:
            return Attempt(None, started.error, started.failures)
        seen, notes, reason = started.value(), [], None
        if "dropout" in late:
            reason = self._other_stream(subject, reference, seen)
            if reason is not None:
                notes.append(f"outputs and gradients with dropout were not compared: {reason}")

        def finish() -> Ran:
            for stage in late:
                seen.values.update(run_stages(subject.make(), self.inputs, conditions, (stage,)).values)
            if reason is not None:  # but what is recomputed is compared with what this model itself drew
                for kind in ("output with dropout", "gradient with dropout"):
                    seen.values.pop(kind, None)
            return Ran(seen, subject.counterparts, tuple(notes))

        return self.world.attempt(finish)

    def _other_stream(self, subject: Subject, reference: UntouchedRun, seen: Observation) -> str | None:
        """Why some rank's dropout gets other random numbers than the untouched model's."""
        promise = Equivalence.weakest(record.primitive.equivalence for record in subject.schedule.records)
        alike = drawn_alike("dropout", reference.seen, seen, subject.counterparts, promise)
        reasons = self.world.gather(alike.other_stream or alike.wrong)
        return next((reason for reason in reasons if reason is not None), None)

    def stages_raising(self, subject: Subject, reference: UntouchedRun) -> tuple[str, ...]:
        """The fewest stages in which a scheduled model that raises does so."""
        return EARLY if self.run(subject, reference, EARLY).failures else reference.stages

    # -- comparing --------------------------------------------------------------------------------------------

    def tolerance(self, reference: UntouchedRun, records: Sequence[Record]) -> Tolerance:
        """What the promises of ``records`` allow."""
        return self._tolerance(reference.coarsest, records)

    def _tolerance(self, dtype: torch.dtype, records: Sequence[Record]) -> Tolerance:
        promises = [record.primitive.equivalence for record in records]
        return Tolerance.of(dtype, promises, rtol=self.rtol, atol=self.atol)

    def compare(self, reference: UntouchedRun, ran: Ran, records: Sequence[Record]) -> Comparison:
        """Hold this rank's run against the untouched model's."""
        by_dtype = {dtype: self._tolerance(dtype, records) for dtype in set(reference.finer.values())}
        finer = {place: by_dtype[dtype] for place, dtype in reference.finer.items()}
        return compare(reference.seen, ran.seen, ran.counterparts, self.tolerance(reference, records), finer)

    def shared(self, own: Comparison) -> list[Comparison]:
        """Every rank's comparison, with its first difference."""
        return self.world.gather(dataclasses.replace(own, differences=own.differences[:1]))

    # -- blame ------------------------------------------------------------------------------------------------

    def blame(self, reference: UntouchedRun, stages: Sequence[str], failed: Failed, *, near: str | None) -> Blame:
        """The steps that fail as the whole schedule does."""

        def try_steps(part: Sequence[Record]) -> Outcome:
            return self._try(reference, stages, failed, part)

        return find_steps(self.subjects.schedule.records, try_steps, near=near, tied=self.subjects.tied_modules())

    def _try(self, reference: UntouchedRun, stages: Sequence[str], failed: Failed, part: Sequence[Record]) -> Outcome:
        """Whether ``part`` alone fails as the whole schedule did; the same answer on every rank."""
        applied = self.world.attempt(lambda: self._trial(part))
        if applied.failures:
            return "refused"
        schedule, counterparts = applied.value()
        schedules = iter([schedule])

        def make() -> nn.Module:
            trial = next(schedules, None) or self.subjects.trial(part)
            return self.subjects.ready(trial, counterparts, reference.conditions.dtype)

        ran = self.run(Subject(schedule, counterparts, make), reference, stages)
        if ran.failures:
            return "differs" if Failed.with_exception(ran.failures[0]) == failed else "other"
        compared = self.world.attempt(lambda: self.compare(reference, ran.value(), part))
        reraise(compared)
        first = first_difference(self.world, self.shared(compared.value()))
        if first is None:
            return "agrees"
        return "differs" if Failed.by(first[1]) == failed else "other"

    def _trial(self, part: Sequence[Record]) -> tuple[Schedule, Counterparts]:
        schedule = self.subjects.trial(part)
        correspondence, _ = Correspondence.of(schedule)
        correspondence.check()
        return schedule, Counterparts.of(correspondence, schedule.model)


def _output_adapter(schedule: Schedule) -> Callable[[Any], Any]:
    """Ask the plugins whether this rank's output has to be gathered first."""

    def adapt(output: Any) -> Any:
        answer = schedule.hooks.single("slapo_gather_output", node=schedule.root, output=output)
        return output if answer is None else answer[1]

    return adapt
