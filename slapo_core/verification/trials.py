"""Run the scheduled model, or parts of its schedule, and see whether it fails, and in the same way."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.errors import HookError, TraceError, VerifyError
from slapo_core.ranks.world import Attempt, World
from slapo_core.spec.equivalence import Equivalence
from slapo_core.verification.blame import Blame, find_steps
from slapo_core.verification.compare import Comparison, compare, drawn_alike
from slapo_core.verification.counterparts import Counterparts
from slapo_core.verification.failing import Failed, Outcome
from slapo_core.verification.inputs import Inputs
from slapo_core.verification.parting import advice, parted, tell, without_effect
from slapo_core.verification.passes import Conditions
from slapo_core.verification.rounding import OF_NORM
from slapo_core.verification.run import (
    EARLY,
    KINDS,
    ON_ONE_COPY,
    OWN_TYPES,
    STAGE_OF_KIND,
    Course,
    Observation,
    run_stages,
)
from slapo_core.verification.staging import Staging
from slapo_core.verification.subjects import Subjects
from slapo_core.verification.suggestions import suggestions
from slapo_core.verification.tolerance import Tolerance
from slapo_core.verification.untouched import UntouchedRun
from slapo_core.verification.values import Difference
from slapo_core.weights.correspondence import Correspondence

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule
    from slapo_core.spec.record import Record

__all__ = ["OtherRankError", "Ran", "Subject", "Trials", "Tried", "first_difference", "reraise", "stages_for"]


@dataclass(frozen=True)
class Subject:
    """A scheduled model to run: its schedule, what its tensors stand for, and what makes fresh copies of it."""

    schedule: Schedule
    counterparts: Counterparts
    make: Callable[[torch.dtype | None], nn.Module]


@dataclass(frozen=True)
class Ran:
    """What a scheduled model gave on this rank."""

    seen: Observation
    counterparts: Counterparts


@dataclass(frozen=True)
class Tried:
    """What came of some steps alone, the same on every rank.

    Args:
        outcome: whether and how they fail.
        first: the rank and the difference that was found first, if they ran and differ.
        gradients: the parameters whose gradients differ, where nothing before them does.
    """

    outcome: Outcome
    first: tuple[int, Difference] | None = None
    gradients: Sequence[str] = ()


def stages_for(kind: str) -> tuple[str, ...]:
    """The stages in which a difference of this kind shows, and those that must agree before it counts as the first."""
    stage = STAGE_OF_KIND[kind]
    return ON_ONE_COPY[: ON_ONE_COPY.index(stage) + 1] if stage in ON_ONE_COPY else (EARLY[0], stage)


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
        staging: calls the models stage by stage where they are cut; None calls them in one piece.
        blame_seconds: after which no further steps are tried; None: no limit.
    """

    world: World
    inputs: Inputs
    subjects: Subjects
    rtol: float | None
    atol: float | None
    staging: Staging | None = None
    blame_seconds: float | None = None

    def run(self, subject: Subject, reference: UntouchedRun, stages: Sequence[str]) -> Attempt[Ran]:
        """Run ``stages`` of a scheduled model under the conditions of the untouched one."""
        early = [stage for stage in stages if stage in EARLY]
        late = [stage for stage in stages if stage not in EARLY]
        started = self.world.attempt(lambda: self.start(subject, reference, early))
        if started.failures:
            return Attempt(None, started.error, started.failures)
        course, seen = started.value()
        reason = self.other_stream(subject, reference, seen) if "dropout" in late else None

        def finish() -> Ran:
            for stage in late:
                seen.values.update(self.late(subject, reference, stage, course, other_stream=reason is not None).values)
            return Ran(seen, subject.counterparts)

        finished = self.world.attempt(finish)
        if not finished.failures:
            self.share(seen)
        return finished

    def start(
        self, subject: Subject, reference: UntouchedRun, stages: Sequence[str] = EARLY
    ) -> tuple[Course, Observation]:
        """The first stages, and the copy that ran them."""
        dtype = reference.conditions.dtype
        course = Course(subject.make(dtype), self.inputs, self.conditions(subject, reference, apart=True))
        return course, course.run(stages)

    def late(
        self, subject: Subject, reference: UntouchedRun, stage: str, course: Course | None, *, other_stream: bool
    ) -> Observation:
        """A later stage: on the copy that ran the first ones, or on a fresh one."""
        conditions = self.conditions(subject, reference)
        if stage in ON_ONE_COPY:
            assert course is not None
            course.conditions = conditions
            return course.run((stage,))
        model = subject.make(None if stage == OWN_TYPES else conditions.dtype)
        seen = run_stages(model, self.inputs, conditions, (stage,))
        if stage == "dropout":
            self._tell(subject, seen)
        if stage == "dropout" and other_stream:  # but what is recomputed is held against what this model itself drew
            for kind in ("output with dropout", "gradient with dropout"):
                seen.values.pop(kind)
        return seen

    def _tell(self, subject: Subject, seen: Observation) -> None:
        drawn = seen.values.pop("drawn with dropout")["forward"]
        if self.world.is_alone or subject.schedule.mesh is None:
            return
        both = seen.of("output with dropout"), seen.of("gradient with dropout")
        seen.values["parted dropout"] = {"own": tell(subject.schedule.mesh, *both, drawn, subject.counterparts)}

    def share(self, seen: Observation) -> None:
        """Let every rank know what the others got with dropout; no rank may have failed since."""
        own = seen.of("parted dropout").get("own")
        told = [each for each in self.world.gather(own) if each is not None] if not self.world.is_alone else []
        if told:
            seen.values["parted dropout"] = {"ranks": told}

    def advice(self, subject: Subject, reference: UntouchedRun, seen: Observation) -> list[str]:
        """Notes on the ranks' dropout, where nothing is wrong with it."""
        told, untouched = seen.of("parted dropout").get("ranks", []), reference.seen.of("dropout")["forward"]
        return [*filter(None, (advice(told, untouched), without_effect(told, untouched, subject.schedule.records)))]

    def conditions(self, subject: Subject, reference: UntouchedRun, *, apart: bool = False) -> Conditions:
        """Those of the untouched model's run, for a scheduled one; ``apart`` for its stages, if it is cut."""
        adapted = dataclasses.replace(reference.conditions, adapt_output=_output_adapter(subject.schedule))
        if self.staging is None:
            return adapted
        return dataclasses.replace(
            adapted, caller=functools.partial(self.staging.caller, subject.schedule, apart=apart)
        )

    def other_stream(self, subject: Subject, reference: UntouchedRun, seen: Observation) -> str | None:
        """Why some rank's dropout gets other random numbers than the untouched model's."""
        promise = Equivalence.weakest(record.primitive.equivalence for record in subject.schedule.records)
        alike = drawn_alike("dropout", reference.seen, seen, subject.counterparts, promise)
        reasons = self.world.gather(alike.other_stream or alike.wrong)
        return next((reason for reason in reasons if reason is not None), None)

    def was_refused(self, attempt: Attempt[Any]) -> bool:
        """Whether plugins would not cut the model, or what they said of its stages cannot be right."""
        refusals = self.staging.refusals if self.staging is not None else set()
        refused = all((failure.kind, failure.text) in refusals for failure in attempt.failures)
        return all(self.world.gather(refused))

    def cannot_be_cut(self, attempt: Attempt[Any]) -> bool:
        """Whether plugins would not cut the model for such a batch: that is told, and says nothing of others."""
        return self.was_refused(attempt) and all(failure.kind == TraceError.__name__ for failure in attempt.failures)

    def contradicts_itself(self, attempt: Attempt[Any]) -> bool:
        """Whether what plugins said of stages cannot be right."""
        return self.was_refused(attempt) and any(failure.kind == HookError.__name__ for failure in attempt.failures)

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

    def _own_tolerance(self, dtype: torch.dtype, records: Sequence[Record], room: float, *, jumps: bool) -> Tolerance:
        """What the user allows is meant for finer types, so it can only add to what the model's own ones need."""
        promises = [record.primitive.equivalence for record in records]
        rule = Tolerance.of(dtype, promises, rtol=None, atol=None)
        return dataclasses.replace(
            rule,
            rtol=max(rule.rtol, self.rtol or 0.0),
            atol=max(rule.atol, self.atol or 0.0) + room,
            of_norm=OF_NORM.get(dtype, 0.2) if jumps else 0.0,
        )

    def compare(self, reference: UntouchedRun, ran: Ran, records: Sequence[Record]) -> Comparison:
        """Hold this rank's run against the untouched model's."""
        by_dtype = {dtype: self._tolerance(dtype, records) for dtype in set(reference.finer.values())}
        finer = {place: by_dtype[dtype] for place, dtype in reference.finer.items()}
        for place, room in reference.room.items():
            dtype = reference.finer[place]
            jumps = "gradient" in place[0] or ("output" in place[0] and dtype in (torch.float16, torch.bfloat16))
            finer[place] = self._own_tolerance(dtype, records, room, jumps=jumps)
        compared = compare(reference.seen, ran.seen, ran.counterparts, self.tolerance(reference, records), finer)
        told = ran.seen.of("parted dropout").get("ranks", [])
        untouched = reference.seen.of("dropout").get("forward", [])
        compared.add(Comparison(parted(told, untouched, records, reference.coarsest)))
        return compared

    def shared(self, own: Comparison) -> list[Comparison]:
        """Every rank's comparison, with its first difference."""
        return self.world.gather(dataclasses.replace(own, differences=own.differences[:1]))

    def gradients(self, first: Difference, own: Comparison) -> list[str]:
        """The parameters whose gradients differ on any rank, if the first difference is in one."""
        names = [found.name for found in own.differences if found.kind == first.kind]
        on_ranks = self.world.gather(names if first.kind == "gradient" else [])
        return list(dict.fromkeys(name for rank in on_ranks for name in rank))

    # -- blame ------------------------------------------------------------------------------------------------

    def blame(
        self,
        reference: UntouchedRun,
        stages: Sequence[str],
        failed: Failed,
        *,
        near: str | None,
        gradients: Sequence[str] = (),
        records: Sequence[Record] | None = None,
    ) -> Blame:
        """The steps that fail as ``records`` do, which are the whole schedule if None.

        ``gradients`` are the parameters whose gradients differ, where nothing before them does.
        """

        started = time.monotonic()

        def is_over() -> bool:
            if self.blame_seconds is None:
                return False
            return any(self.world.gather(time.monotonic() - started > self.blame_seconds))

        def try_steps(part: Sequence[Record]) -> Outcome:
            return self.try_steps(reference, stages, part).outcome

        return find_steps(
            self.subjects.schedule.records if records is None else records,
            try_steps,
            near=near,
            tied=self.subjects.tied_modules(),
            failed=failed,
            suggest=lambda: suggestions(self.subjects.schedule, gradients),
            paths=[path for path, _ in self.subjects.untouched.named_modules()],
            stop=is_over,
        )

    def try_steps(
        self,
        reference: UntouchedRun,
        stages: Sequence[str],
        part: Sequence[Record],
        promises: Sequence[Record] | None = None,
    ) -> Tried:
        """What comes of ``part`` alone, held to the promises of its own steps, or of others; the same on every rank."""
        applied = self.world.attempt(lambda: self._trial(part))
        if applied.failures:
            return Tried("refused")
        schedule, counterparts = applied.value()
        schedules = iter([schedule])

        def make(dtype: torch.dtype | None) -> nn.Module:
            trial = next(schedules, None) or self.subjects.trial(part)
            return self.subjects.ready(trial, counterparts, dtype)

        ran = self.run(Subject(schedule, counterparts, make), reference, stages)
        if ran.failures:
            return Tried(Failed.with_exception(ran.failures[0]))
        held_to = part if promises is None else promises
        compared = self.world.attempt(lambda: self.compare(reference, ran.value(), held_to))
        reraise(compared)
        first = first_difference(self.world, self.shared(compared.value()))
        if first is None:
            return Tried("agrees")
        return Tried(Failed.by(first[1]), first, self.gradients(first[1], compared.value()))

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
