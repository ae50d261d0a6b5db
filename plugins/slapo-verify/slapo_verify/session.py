"""Verify a schedule on all ranks: run both models, judge, and blame."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.errors import InputError, VerifyError
from slapo_core.internals import describe
from slapo_runtime.ranks.consistency import SAME_SCRIPT, obligations, schedule_facts
from slapo_runtime.ranks.facts import RankFact, describe_tensor
from slapo_runtime.ranks.trial_groups import Failure
from slapo_runtime.ranks.world import World
from slapo_runtime.receipts.receipt import left_to_targets
from slapo_runtime.schedule_copies import repeated
from slapo_verify.approximate import loose, without_approximate_steps
from slapo_verify.blame import Blame
from slapo_verify.both_models import BothModels, ReferenceRunError
from slapo_verify.compare import Difference
from slapo_verify.copies import ModelCopies, changed_outside, named_tensors
from slapo_verify.inputs import Inputs
from slapo_verify.kinds import EARLY, KINDS, OWN_TYPES, label, phases_for
from slapo_verify.precision import dtype_name
from slapo_verify.refusals import refuse_unexplained, refuse_unsaid_freezing
from slapo_verify.report import ScheduleSet, VerifyOutcome, VerifyReport, merge_largest
from slapo_verify.stages import CutFault, Staging, find_cut_fault, without_cuts
from slapo_verify.trials import OtherRankError, ReferenceRun, ScheduleTrials, TrialResult, VerifyOptions, reraise

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_core.primitive import Record, Violation
    from slapo_runtime.receipts.receipt import Finding

_OF_TYPES = re.compile(r"half|b?float16|[bf]p?16|dtype", re.I)
"""In messages of operators and kernels that do not take a type."""

_INPUT_ERROR = InputError.__name__
_SAME_CALL = "make every rank build the same model (torch.manual_seed), and call verify with the same arguments"


def check_each(
    schedules: Sequence[Schedule],
    example_inputs: Any,
    options: VerifyOptions,
    *,
    schedule_set: ScheduleSet | None = None,
) -> list[VerifyOutcome]:
    """Verify schedules in this process, with the other ranks of their mesh.

    Args:
        schedules: of one model; see :func:`slapo_core.verify`.
        example_inputs: one batch.
        options: of the call.
        schedule_set: all schedules of the call, where ``schedules`` are a part of them.
    """
    schedule_set = schedule_set or ScheduleSet(schedules)
    outcomes: list[VerifyOutcome] = []
    for schedule in schedules:
        try:
            outcomes.append(_check(schedule, example_inputs, options, schedule_set))
        except VerifyError as error:
            if len(schedule_set.schedules) == 1 or isinstance(error, OtherRankError):
                raise
            outcomes.append(error)
    return outcomes


def _check(schedule: Schedule, example_inputs: Any, options: VerifyOptions, schedule_set: ScheduleSet) -> VerifyReport:
    def prepare() -> tuple[Inputs, Sequence[RankFact]]:
        inputs = Inputs.of(example_inputs)
        with schedule.reference() as reference_model:
            schedule_set.require_same_model(schedule, reference_model)
            return inputs, tuple(_facts(inputs, reference_model, options)) if schedule.mesh is not None else ()

    with World(schedule.mesh) as world:
        prepared = world.attempt(prepare)
        reraise(prepared)
        inputs, facts = prepared.value()
        world.agree(schedule_facts(schedule), hint=SAME_SCRIPT)
        world.agree((*schedule_set.facts(world.ranks), *facts), hint=_SAME_CALL)
        with world.trial_mesh(options.timeout) as mesh:

            def make() -> tuple[ModelCopies, str | None]:
                tried = schedule if mesh is schedule.mesh else repeated(schedule, mesh)
                changed = None if tried is schedule else changed_outside(schedule, tried)
                return ModelCopies(tried, device=inputs.device, seed=options.seed), changed

            made = world.attempt(make)
            reraise(made)
            copies, changed = made.value()
            _refuse_changed(dict(zip(world.ranks, world.gather(changed), strict=True)))
            return Session(ScheduleTrials(world, inputs, copies, options, Staging())).run()


def _refuse_changed(by_rank: Mapping[int, str | None]) -> None:
    for rank, name in by_rank.items():
        if name is not None:
            raise VerifyError(
                f"'{name}' on rank {rank} differs from the result of the steps\n"
                "  no step causes it: it was changed outside of the schedule, after its first step",
                tensor=name,
                rank=rank,
                steps=[],
                hint=f"change the model before create_schedule(model), or by a step: sch['{name.rpartition('.')[0]}']"
                ".replace(...)",
            )


def _facts(inputs: Inputs, reference_model: nn.Module, options: VerifyOptions) -> Iterator[RankFact]:
    """Yield the facts besides the schedule that must be equal on every rank."""
    for name in ("rtol", "atol", "optimizer_steps", "seed"):
        yield RankFact(f"{name} given to verify", describe(getattr(options, name)))
    yield from inputs.facts()
    for number, batch in enumerate(options.more_batches, start=2):
        yield from batch.facts(f"batch {number}, input")
    for name, tensor in named_tensors(reference_model):
        yield RankFact(f"'{name}' of the reference model", describe_tensor(tensor))


class Session:
    """Verify one schedule.

    Args:
        trials: runs both models.
    """

    def __init__(self, trials: ScheduleTrials) -> None:
        self.trials, self.world, self.copies = trials, trials.world, trials.copies
        self.schedule = self.copies.schedule
        self.notes: list[str] = []
        if self.copies.frozen:
            self.notes.append(f"set by the schedule, in both models: {', '.join(self.copies.frozen)}")

    def run(self) -> VerifyReport:
        """Compare the models in the finest type that both run in, then judge.

        Raises:
            VerifyError: the models differ.
        """
        refuse_unexplained(self.world, self.copies)
        self.notes += refuse_unsaid_freezing(self.world, self.copies)
        own = self.trials.own_dtype(self.copies.reference_model)
        dtypes: list[torch.dtype | None] = [torch.float64, torch.float32, None]
        if own in (torch.float32, torch.float64):
            dtypes.remove(torch.float32)
        raised: dict[str, list[str]] = {}  # what raises -> the types that it does not take
        tried: list[BothModels] = []
        for dtype in dtypes:
            try:
                both = BothModels(self.trials, dtype).run()
            except ReferenceRunError as error:
                if dtype is None:
                    raise error.refuse() from error.error
                raised.setdefault(f"the reference model raises: {error.failure}", []).append(dtype_name(dtype))
                continue
            tried.append(both)
            if both.raised is None or own is torch.float64 or OWN_TYPES in both.reference.phases:
                break
            if dtype is not None:
                failure = both.raised.failures[0]
                raised.setdefault(f"the scheduled model raises: {failure}", []).append(dtype_name(dtype))
        if both.raised is not None:
            first = _most_precise(tried, both.raised.failures[0])
            self._raise(
                first.reference, TrialResult.raising(first.raised), self.schedule.records, batch=first.raised_for
            )
        if raised:
            own_types = f"the model's own types ({dtype_name(both.reference.coarsest)})"
            why = (f"not in {' or '.join(dtypes)}, because {what}" for what, dtypes in raised.items())
            self.notes.append(f"compared in {own_types if dtype is None else dtype_name(dtype)}; {'; '.join(why)}")
        if _is_late(self.trials.conclude(both.comparison)):  # loose tolerances or weights of zero hid it before
            self._judge_beside_approximate_steps(both.reference)
            self._judge_with_other_values(dtype)
            self.copies.restore_constants()
        report = self._judge(both)
        self._judge_with_other_values(dtype)
        left = left_to_targets(self.schedule)
        notes = (*self.notes, *both.notes, *([] if left is None else [left]))
        return dataclasses.replace(report, notes=tuple(dict.fromkeys(notes)))

    def _judge(self, both: BothModels) -> VerifyReport:
        records, reference = self.schedule.records, both.reference
        found = self.trials.conclude(both.comparison)
        strict: Sequence[Record] = ()
        if found.agrees or _is_late(found):
            strict = self._judge_beside_approximate_steps(reference)  # a later phase may show what they hide
        if not found.agrees:
            self._raise(reference, found, records)
        effects = self._judge_effects(both)
        shared = self.world.gather(both.comparison)
        tolerance = self.trials.tolerance(reference, records)
        options, largest = self.trials.options, merge_largest([comparison.largest for comparison in shared])
        is_given = options.rtol is not None or options.atol is not None
        element = next((entry.element for entry in largest if entry.kind == "output"), 0.0)
        return VerifyReport(
            model=type(self.schedule.model).__name__,
            steps_verified=len(records),
            world_size=self.world.size,
            dtype=dtype_name(reference.dtype),
            coarsest_dtype=dtype_name(reference.coarsest),
            tolerance=str(tolerance),
            optimizer_steps=options.optimizer_steps if "updates" in reference.phases else 0,
            largest=largest,
            not_compared=tuple(dict.fromkeys(text for comparison in shared for text in comparison.not_compared)),
            notes=(*self.notes, *both.notes),
            effects=effects,
            loose=loose(records, tolerance, element, strict, given=is_given),
        )

    def _judge_effects(self, both: BothModels) -> int | None:
        """Return the number of effects seen on all ranks; None where they are not looked for.

        Raises:
            VerifyError: one is missing; the first rank's.
        """
        if both.receipts is None:
            return None
        by_rank = self.world.gather(both.receipts.findings())
        for rank, findings in enumerate(by_rank):
            for one in findings:
                if not one.is_seen:
                    self._raise_missing(one, None if self.world.is_alone else rank, findings)
        return sum(map(len, by_rank))

    def _raise_missing(self, one: Finding, rank: int | None, findings: Sequence[Finding]) -> None:
        others = sum(not each.is_seen for each in findings) - 1
        more = f"\n  and {others} more are missing on this rank" if others else ""
        where = "" if rank is None else f" on rank {rank}"
        raise VerifyError(
            f"numbers agree, but an effect is missing{where}: {one}{more}",
            rank=rank,
            steps=[one.source] if one.source else [],
            hint=None if one.source else "make the collective by a step, or verify(sch, batch, effects=False)",
        )

    def _judge_with_other_values(self, dtype: torch.dtype | None) -> None:
        """Compare again with random values where constant ones hide mistakes."""
        drawn = self.copies.redraw_constants()
        if not drawn:
            return
        what = f"{len(drawn)} parameters that are constant or small, e.g. '{drawn[0]}', as random values"
        try:
            both = BothModels(self.trials, dtype, watches=False).run_early()
        except ReferenceRunError as error:
            self.notes.append(f"not compared with {what}: the reference model raises: {error.failure}")
            return
        note = f"compared once more with {what}"
        self.notes.append(note)  # for the message of an error
        if both.raised is not None:
            self._raise(both.reference, TrialResult.raising(both.raised), self.schedule.records)
        self._judge(both)
        self.notes.remove(note)

    def _judge_beside_approximate_steps(self, reference: ReferenceRun) -> Sequence[Record]:
        """Check the exact steps under their own promises; return them where all of them agree."""
        hidden = without_approximate_steps(self.trials, reference, self.schedule.records)
        if hidden is None:
            return ()
        if hidden.note:
            self.notes.append(hidden.note)
        if hidden.found is not None:
            left_out = ", ".join(f"#{record.index}" for record in hidden.left_out)
            self.notes.append(f"compared without {left_out}, because the tolerance of approximate steps hides it")
            self._raise(hidden.reference, hidden.found, hidden.rest)
        return () if hidden.note else hidden.rest

    # -- raising ----------------------------------------------------------------------------------------------

    def _raise(
        self, reference: ReferenceRun, result: TrialResult, records: Sequence[Record], *, batch: str = ""
    ) -> None:
        """Find the steps to blame, and raise.

        Raises:
            VerifyError: that names the steps which make the scheduled model differ, or raise.
            InputError: every rank raised it; it names the step's place, and has a hint, itself.
        """
        if result.raised is not None and [each.kind for each in result.failures] == [_INPUT_ERROR] * self.world.size:
            reraise(result.raised)
        phases = reference.phases if result.kind is None else phases_for(result.kind)
        again = self.trials.again(reference, phases)
        fault: CutFault | None = None
        if self._is_cut():
            uncut = self.trials.without_stages(again, phases, records)
            if uncut.agrees and result.raised is not None and self.trials.was_refused(result.raised):
                reraise(result.raised)
            if uncut.agrees:
                error = result.raised.error if result.raised is not None else None
                fault = find_cut_fault(self.trials, again, records, kind=result.kind, error=error)
            else:
                records = without_cuts(self.trials, records)
                self.trials = dataclasses.replace(self.trials, staging=None)
                result = result if uncut.outcome == "refused" else uncut
        phases = self._phases_of(again, result)
        rank, found = result.first or (result.failures[0].rank, None)
        owner = _owner(found) if found is not None else result.failures[0].module or None
        blame: Blame | CutFault | None = fault
        if blame is None and found is not None and found.by:
            blame = Blame.by_place([record for record in records if record.index in found.by])
        elif blame is None:
            blame = self.trials.blame(again, phases, result, near=owner, records=records)
        where = "" if self.world.is_alone else f" on rank {rank}"
        known: dict[str, Any] = {
            "rank": None if self.world.is_alone else rank,
            "steps": [str(record) for record in blame.records],
            "plugin": fault.plugin if fault is not None else None,
        }
        is_solved = isinstance(blame, Blame) and blame.suggestion is not None and not blame.of_part
        missing = "" if is_solved else "".join(f"\n  missing: {text}" for text in _once(obligations(self.schedule)))
        if result.raised is not None:
            first, *others = result.failures
            others = [other for other in others if (other.kind, other.where) != (first.kind, first.where)]
            also = "".join(f"\n  and on rank {other.rank}: {other}" for other in others)
            where = (f" for {batch}" if batch else "") + where
            raise VerifyError(
                f"the scheduled model raises{where} where the reference model does not: {first}{also}\n"
                f"{blame}{missing}",
                hint=self._autocast_call(again) if _OF_TYPES.search(first.text) else None,
                **known,
            ) from result.raised.error
        assert found is not None
        name = label(found.kind, found.name, self.trials.options.optimizer_steps)
        if found.kind == "batch gradient":  # outputs have their batch in their names
            called = ", ".join(called for called, _ in again.conditions.more_batches)
            self.notes.append(f"further batches: {called}")
        self.notes += self._full_beside_shards(found, blame)
        raise VerifyError(
            f"the scheduled model differs from the reference model, first in {name}{where}: {found.problem}\n"
            f"  allowed: {found.rule or self.trials.tolerance(again, records)}\n{blame}{missing}"
            + "".join(f"\n  note: {note}" for note in self.notes),
            tensor=name,
            difference=found.largest,
            tolerance=found.allowed,
            path=owner,
            hint=found.hint,
            **known,
        )

    def _phases_of(self, reference: ReferenceRun, result: TrialResult) -> tuple[str, ...]:
        """Find the fewest phases that show the failure."""
        if result.kind is not None:
            return phases_for(result.kind)
        early = self.trials.run(self.trials.candidate, reference, EARLY)
        return EARLY if early.failures else reference.phases

    def _autocast_call(self, reference: ReferenceRun) -> str | None:
        """Return the call under autocast, if the scheduled model runs there."""
        kind = self.copies.device.type
        own = self.trials.own_dtype(self.copies.reference_model)
        if own is not torch.float32 or torch.is_autocast_enabled(kind):
            return None
        conditions = dataclasses.replace(reference.conditions, dtype=None)
        with torch.autocast(kind, torch.bfloat16):
            ran = self.trials.run(self.trials.candidate, dataclasses.replace(reference, conditions=conditions), EARLY)
        call = f"with torch.autocast('{kind}', torch.bfloat16): slapo.verify(sch, batch)"
        return None if ran.failures else f"it runs under autocast; if you train so: `{call}`"

    def _full_beside_shards(self, found: Difference, blame: Blame | CutFault) -> list[str]:
        """List full parameters that a reduction may add once per rank."""
        if self.world.is_alone or "output" not in found.kind:
            return []
        paths = dict.fromkeys(record.path for record in blame.records)
        full = [name for path in paths for name in self.copies.counterparts.full_beside_shards(path)]
        names = " and ".join(map(repr, full))
        return [f"every rank holds the full {names}: added to a partial sum, it counts once for each rank"] * bool(full)

    def _is_cut(self) -> bool:
        """Return whether stages were made or refused on any rank."""
        staging = self.trials.staging
        return any(self.world.gather(staging is not None and staging.is_needed))


def _most_precise(tried: Sequence[BothModels], last: Failure) -> BothModels:
    """Return the first run, the most precise, that raises as the last one did."""
    raised = ((both, both.raised.failures[0]) for both in tried if both.raised is not None)
    return next(both for both, found in raised if (found.kind, found.where) == (last.kind, last.where))


_IN_BLOCKS = re.compile(r"#\d+|(?<=\.)\d+(?=[.'])")


def _once(violations: Sequence[Violation]) -> list[str]:
    """Format violations; equal ones in repeated blocks once."""
    alike: dict[str, list[str]] = {}
    for text in map(str, violations):
        alike.setdefault(_IN_BLOCKS.sub("*", text), []).append(text)
    more = (f" (and {len(same) - 1} like it in other blocks)" * (len(same) > 1) for same in alike.values())
    return [same[0] + other for same, other in zip(alike.values(), more, strict=True)]


def _is_late(found: TrialResult) -> bool:
    """Return whether the first difference is of a later phase than outputs and gradients."""
    return found.kind is not None and KINDS[found.kind].phase not in EARLY


def _owner(found: Difference) -> str | None:
    """Return the module of a difference; None for the model itself."""
    if "output" in found.kind or found.kind == "input gradient":
        return None
    return found.name if "dropout" in found.kind and "gradient" not in found.kind else found.name.rpartition(".")[0]
