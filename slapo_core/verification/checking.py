"""The course of a verification: both models run on every rank, every rank compares its own pieces, all agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.errors import VerifyError
from slapo_core.ranks.facts import RankFact, describe, describe_tensor
from slapo_core.ranks.world import Attempt, World
from slapo_core.schedule.agreement import SAME_SCRIPT, schedule_facts
from slapo_core.schedule.obligations import obligations
from slapo_core.verification.blame import Blame
from slapo_core.verification.compare import label
from slapo_core.verification.counterparts import named_tensors
from slapo_core.verification.cut_faults import CutFault, find_cut_fault, run_in_one_piece, without_cuts
from slapo_core.verification.failing import Failed
from slapo_core.verification.freezing import refuse_unsaid_freezing
from slapo_core.verification.inputs import Inputs
from slapo_core.verification.loose import without_loose_steps
from slapo_core.verification.precision import dtype_name, own_dtype
from slapo_core.verification.pristine import changed_outside, repeated
from slapo_core.verification.report import VerifyReport, merge_largest
from slapo_core.verification.run import OWN_TYPES
from slapo_core.verification.several import Outcome, Siblings
from slapo_core.verification.staging import Staging
from slapo_core.verification.subjects import Subjects
from slapo_core.verification.trials import OtherRankError, Subject, Trials, first_difference, reraise, stages_for
from slapo_core.verification.turns import Turned, Turns, UntouchedRunError
from slapo_core.verification.unexplained import refuse_unexplained
from slapo_core.verification.untouched import UntouchedRun, UntouchedRuns
from slapo_core.verification.values import Difference

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule
    from slapo_core.spec.record import Record

__all__ = ["Options", "check_each"]

_SAME_CALL = "make every rank build the same model (torch.manual_seed), and call verify with the same arguments"


@dataclass(frozen=True)
class Options:
    """The keyword arguments of :func:`slapo_core.verify`."""

    rtol: float | None
    atol: float | None
    optimizer_steps: int
    seed: int
    more_batches: tuple[Inputs, ...] = ()
    blame_seconds: float | None = None
    timeout: float | None = None


def check_each(
    schedules: Sequence[Schedule], example_inputs: Any, options: Options, *, siblings: Siblings | None = None
) -> list[Outcome]:
    """Verify in this process, one schedule after the other, together with the other ranks of its mesh.

    Args:
        schedules: of one model; see :func:`slapo_core.verify`.
        example_inputs: one batch.
        options: of the call.
        siblings: all schedules of the call, where ``schedules`` are a part of them.
    """
    siblings = siblings or Siblings(schedules)
    outcomes: list[Outcome] = []
    for schedule in schedules:
        try:
            outcomes.append(_check(schedule, example_inputs, options, siblings))
        except VerifyError as error:
            if len(siblings.schedules) == 1 or isinstance(error, OtherRankError):
                raise
            outcomes.append(error)
    return outcomes


def _check(schedule: Schedule, example_inputs: Any, options: Options, siblings: Siblings) -> VerifyReport:
    with World(schedule.mesh) as world:
        prepared = world.attempt(lambda: _prepare(schedule, example_inputs, options, siblings))
        reraise(prepared)
        inputs, facts = prepared.value()
        world.agree(schedule_facts(schedule), hint=SAME_SCRIPT)
        world.agree((*siblings.facts(world.ranks), *facts), hint=_SAME_CALL)
        with world.trial_mesh(options.timeout) as mesh:

            def make() -> tuple[Subjects, str | None]:
                tried = schedule if mesh is schedule.mesh else repeated(schedule, mesh)
                changed = None if tried is schedule else changed_outside(schedule, tried)
                return Subjects(tried, device=inputs.device, seed=options.seed), changed

            made = world.attempt(make)
            reraise(made)
            subjects, changed = made.value()
            _refuse_changed(dict(zip(world.ranks, world.gather(changed), strict=True)))
            return _Check(world, inputs, subjects, options, siblings).run()


def _refuse_changed(by_rank: Mapping[int, str | None]) -> None:
    for rank, name in by_rank.items():
        if name is not None:
            raise VerifyError(
                f"'{name}' on rank {rank} is not what the steps make of it\n"
                "  no step does it: it was changed outside of the schedule, after its first step",
                tensor=name,
                rank=rank,
                steps=[],
                hint=f"change the model before create_schedule(model), or by a step: sch['{name.rpartition('.')[0]}']"
                ".replace(...)",
            )


def _prepare(
    schedule: Schedule, example_inputs: Any, options: Options, siblings: Siblings
) -> tuple[Inputs, Sequence[RankFact]]:
    inputs = Inputs.of(example_inputs)
    with schedule.untouched() as untouched:
        siblings.require_same_model(schedule, untouched)
        return inputs, tuple(_facts(inputs, untouched, options)) if schedule.mesh is not None else ()


def _facts(inputs: Inputs, untouched: nn.Module, options: Options) -> Iterator[RankFact]:
    """What beside the schedule must be the same on every rank."""
    for name in ("rtol", "atol", "optimizer_steps", "seed"):
        yield RankFact(f"{name} given to verify", describe(getattr(options, name)))
    yield from inputs.facts()
    for number, batch in enumerate(options.more_batches, start=2):
        yield from batch.facts(f"batch {number}, input")
    for name, tensor in named_tensors(untouched):
        yield RankFact(f"'{name}' of the untouched model", describe_tensor(tensor))


class _Check:
    def __init__(self, world: World, inputs: Inputs, subjects: Subjects, options: Options, siblings: Siblings) -> None:
        self.world, self.inputs, self.subjects, self.options = world, inputs, subjects, options
        self.siblings = siblings
        self.schedule = subjects.schedule
        self.trials = Trials(
            world,
            inputs,
            subjects,
            rtol=options.rtol,
            atol=options.atol,
            staging=Staging(),
            blame_seconds=options.blame_seconds,
        )
        self.runs = UntouchedRuns(
            inputs, options.more_batches, subjects, seed=options.seed, optimizer_steps=options.optimizer_steps
        )
        self.subject = Subject(self.schedule, subjects.counterparts, subjects.candidate)
        self.turns = Turns(world, self.runs, self.trials, self.subject, self.schedule.records)
        self.notes: list[str] = []
        if subjects.frozen:
            self.notes.append(f"as the schedule says, in both models: {', '.join(subjects.frozen)}")

    def run(self) -> VerifyReport:
        refuse_unexplained(self.world, self.subjects)
        self.notes += refuse_unsaid_freezing(self.world, self.subjects)
        own = own_dtype(self.subjects.untouched, (tensor for _, tensor in self.inputs.tensors()))
        dtypes: list[torch.dtype | None] = [torch.float64, torch.float32, None]
        if own in (torch.float32, torch.float64):
            dtypes.remove(torch.float32)
        raised: list[str] = []
        tried: list[tuple[UntouchedRun, Attempt[Any], str]] = []
        for dtype in dtypes:
            try:
                outcome = self.turns.run(dtype)
            except UntouchedRunError as raising:
                if dtype is None:
                    raise raising.refuse() from raising.error
                raised.append(f"the untouched one raises in {dtype_name(dtype)}: {raising.failure}")
                continue
            if outcome.raised is not None:
                tried.append((outcome.reference, outcome.raised, outcome.raised_for))
            if outcome.raised is None or own is torch.float64 or OWN_TYPES in outcome.reference.stages:
                break
            if dtype is not None:
                raised.append(f"the scheduled model raises in {dtype_name(dtype)}: {outcome.raised.failures[0]}")
        if outcome.raised is not None:
            reference, attempt, batches = _most_precise(tried)
            self._raise_exception(reference, attempt, batches=batches)
        if raised:
            ran = "the model's own types" if dtype is None else dtype_name(dtype)
            self.notes.append(f"both ran in {ran}, because {'; '.join(raised)}")
        report = self._judge(outcome)
        self._judge_with_other_values(dtype)
        return dataclasses.replace(report, notes=tuple(dict.fromkeys((*self.notes, *outcome.notes))))

    # -- judging ----------------------------------------------------------------------------------------------

    def _judge(self, outcome: Turned) -> VerifyReport:
        records, reference = self.schedule.records, outcome.reference
        shared = self.trials.shared(outcome.comparison)
        first = first_difference(self.world, shared)
        if first is not None:
            untouched = self.runs.again(reference, stages_for(first[1].kind))
            self._raise_difference(untouched, *first, self.trials.gradients(first[1], outcome.comparison), records)
        self._judge_beside_loose_steps(reference)
        return VerifyReport(
            model=type(self.schedule.model).__name__,
            steps_verified=len(records),
            world_size=self.world.size,
            dtype=dtype_name(reference.dtype),
            coarsest_dtype=dtype_name(reference.coarsest),
            tolerance=str(self.trials.tolerance(reference, records)),
            optimizer_steps=self.options.optimizer_steps if "updates" in reference.stages else 0,
            largest=merge_largest([comparison.largest for comparison in shared]),
            not_compared=tuple(dict.fromkeys(text for comparison in shared for text in comparison.not_compared)),
            notes=(*self.notes, *outcome.notes),
        )

    def _judge_with_other_values(self, dtype: torch.dtype | None) -> None:
        """Compare outputs and gradients once more, with random values where the model's own hide mistakes."""
        drawn = self.subjects.redraw_constants()
        if not drawn:
            return
        what = f"{len(drawn)} parameters that are constant or small, e.g. '{drawn[0]}', as random values"
        try:
            outcome = self.turns.run_early(dtype)
        except UntouchedRunError as raising:
            self.notes.append(f"not compared with {what}: the reference model raises: {raising.failure}")
            return
        note = f"compared once more with {what}"
        self.notes.append(note)  # for the message of an error
        if outcome.raised is not None:
            self._raise_exception(outcome.reference, outcome.raised)
        self._judge(outcome)
        self.notes.remove(note)

    def _judge_beside_loose_steps(self, reference: UntouchedRun) -> None:
        """Hold the steps that are not approximate to their own promises."""
        hidden = without_loose_steps(self.trials, self.runs, reference, self.schedule.records)
        if hidden is None:
            return
        if hidden.note:
            self.notes.append(hidden.note)
        if hidden.found is not None and hidden.found.first is not None:
            left_out = ", ".join(f"#{record.index}" for record in hidden.left_out)
            self.notes.append(f"compared without {left_out}, because the tolerance of approximate steps hides it")
            gradients = hidden.found.gradients
            self._raise_difference(hidden.reference, *hidden.found.first, gradients, hidden.rest)

    def _raise_difference(
        self,
        untouched: UntouchedRun,
        rank: int,
        found: Difference,
        gradients: Sequence[str],
        records: Sequence[Record],
    ) -> None:
        stages = stages_for(found.kind)
        blame: Blame | CutFault | None = None
        if self._is_cut():
            whole = run_in_one_piece(self.trials, self.subject, untouched, stages, records)
            if whole.agrees:
                blame = find_cut_fault(self.trials, self.subject, untouched, records, kind=found.kind)
            else:
                records = without_cuts(self.trials, records)
                self.trials = whole.trials
                if whole.raised is not None:
                    self._raise_exception(untouched, whole.raised, records)
                if whole.first is not None:
                    (rank, found), gradients = whole.first, whole.gradients
                    stages = stages_for(found.kind)
        owner = _owner(found)
        if blame is None and found.by:
            blame = Blame.by_place([record for record in records if record.index in found.by])
        elif blame is None:
            failed = Failed.by(found)
            blame = self.trials.blame(untouched, stages, failed, near=owner, gradients=gradients, records=records)
        name = label(found.kind, found.name, self.options.optimizer_steps)
        if found.kind == "batch gradient":  # outputs have their batch in their names
            self.notes.append(
                f"further batches: {', '.join(called for called, _ in untouched.conditions.more_batches)}"
            )
        self.notes += self._full_beside_shards(found, blame)
        where = f" on rank {rank}" if not self.world.is_alone else ""
        tolerance = self.trials.tolerance(untouched, records)
        raise VerifyError(
            f"the scheduled model differs from the untouched one, first in {name}{where}: {found.problem}\n"
            f"  allowed: {found.rule or tolerance}\n{blame}{self._missing()}"
            + "".join(f"\n  note: {note}" for note in self.notes),
            tensor=name,
            difference=found.largest,
            tolerance=found.allowed,
            rank=None if self.world.is_alone else rank,
            steps=[str(record) for record in blame.records],
            path=owner,
            plugin=blame.plugin if isinstance(blame, CutFault) else None,
            hint=found.hint,
        )

    def _full_beside_shards(self, found: Difference, blame: Blame | CutFault) -> list[str]:
        """Parameters that a reduction at a module of an unknown type may add once for each rank."""
        if self.world.is_alone or "output" not in found.kind:
            return []
        paths = dict.fromkeys(record.path for record in blame.records)
        full = [name for path in paths for name in self.subject.counterparts.full_beside_shards(path)]
        names = " and ".join(map(repr, full))
        return [f"every rank holds the full {names}: added to a partial sum, it counts once for each rank"] * bool(full)

    def _raise_exception(
        self,
        reference: UntouchedRun,
        candidate: Attempt[Any],
        records: Sequence[Record] | None = None,
        *,
        batches: str = "",
    ) -> None:
        records = self.schedule.records if records is None else records
        first = candidate.failures[0]
        reference = self.runs.again(reference, reference.stages)
        blame: Blame | CutFault | None = None
        if self._is_cut():
            whole = run_in_one_piece(self.trials, self.subject, reference, reference.stages, records)
            if whole.agrees and self.trials.was_refused(candidate):
                reraise(candidate)
            if whole.agrees:
                blame = find_cut_fault(self.trials, self.subject, reference, records, error=candidate.error)
            else:
                records = without_cuts(self.trials, records)
                self.trials = whole.trials
                if whole.first is not None:
                    self._raise_difference(reference, *whole.first, whole.gradients, records)
                candidate = whole.raised or candidate
                first = candidate.failures[0]
        if blame is None:
            stages = self.trials.stages_raising(self.subject, reference)
            failed = Failed.with_exception(first)
            blame = self.trials.blame(reference, stages, failed, near=None, records=records)
        where = f" for {batches}" if batches else ""
        where += f" on rank {first.rank}" if not self.world.is_alone else ""
        others = [other for other in candidate.failures[1:] if (other.kind, other.where) != (first.kind, first.where)]
        also = "".join(f"\n  and on rank {other.rank}: {other}" for other in others)
        raise VerifyError(
            f"the scheduled model raises{where} where the untouched one does not: {first}{also}\n"
            f"{blame}{self._missing()}",
            rank=None if self.world.is_alone else first.rank,
            steps=[str(record) for record in blame.records],
            plugin=blame.plugin if isinstance(blame, CutFault) else None,
        ) from candidate.error

    def _is_cut(self) -> bool:
        """Whether stages were made, or refused, on any rank, and are still asked for."""
        staging = self.trials.staging
        return any(self.world.gather(staging is not None and staging.is_needed))

    def _missing(self) -> str:
        return "".join(f"\n  missing: {violation}" for violation in obligations(self.schedule))


def _most_precise(
    tried: Sequence[tuple[UntouchedRun, Attempt[Any], str]],
) -> tuple[UntouchedRun, Attempt[Any], str]:
    """Of the runs that raise as the last one did, the first: what cures it agrees there with less rounding."""
    last = tried[-1][1].failures[0]
    return next(
        each for each in tried if (found := each[1].failures[0]).kind == last.kind and found.where == last.where
    )


def _owner(found: Difference) -> str | None:
    """The module that a difference lies at; None if it is one of the whole model."""
    if "output" in found.kind or found.kind == "input gradient":
        return None
    return found.name if "dropout" in found.kind and "gradient" not in found.kind else found.name.rpartition(".")[0]
