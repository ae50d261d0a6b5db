"""Whether what is wrong comes from the cuts, and where: the same schedule runs in one piece, and in stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slapo_core.pipeline.staged import Staged
from slapo_core.ranks.world import Attempt
from slapo_core.verification.calls_seen import OtherCall, SeenCalls, first_other_call
from slapo_core.verification.run import STAGE_OF_KIND, Course
from slapo_core.verification.staging import Staging
from slapo_core.verification.trials import Subject, Trials, first_difference, reraise
from slapo_core.verification.untouched import UntouchedRun
from slapo_core.verification.values import Difference

if TYPE_CHECKING:
    from slapo_core.spec.record import Record

__all__ = ["CutFault", "InOnePiece", "find_cut_fault", "run_in_one_piece", "without_cuts"]


@dataclass(frozen=True)
class InOnePiece:
    """What came of a schedule that is run without its cuts, the same on every rank.

    Args:
        trials: that run models so.
        agrees: whether it agrees with the untouched model.
        raised: where it raises; None if it does not, or a part of the steps was run.
        first: the rank and the first difference; None if it agrees, or raises.
        gradients: the parameters whose gradients differ, where nothing before them does.
    """

    trials: Trials
    agrees: bool
    raised: Attempt[Any] | None = None
    first: tuple[int, Difference] | None = None
    gradients: Sequence[str] = ()


def run_in_one_piece(
    trials: Trials, subject: Subject, reference: UntouchedRun, stages: Sequence[str], records: Sequence[Record]
) -> InOnePiece:
    """Run what failed stage by stage once more, without the cuts; all ranks call it.

    Args:
        trials: that ran it.
        subject: the scheduled model.
        reference: the untouched model's run, with what ``stages`` give.
        stages: of a run of both models.
        records: the steps; those of the whole schedule, or a part of them.
    """
    plain = dataclasses.replace(trials, staging=None)
    if len(records) < len(subject.schedule.records):
        tried = plain.try_steps(reference, stages, records)
        return InOnePiece(plain, tried.outcome == "agrees", None, tried.first, tried.gradients)
    ran = plain.run(subject, reference, stages)
    if ran.failures:
        return InOnePiece(plain, agrees=False, raised=ran)
    compared = plain.world.attempt(lambda: plain.compare(reference, ran.value(), records))
    reraise(compared)
    first = first_difference(plain.world, plain.shared(compared.value()))
    gradients = plain.gradients(first[1], compared.value()) if first is not None else ()
    return InOnePiece(plain, first is None, None, first, gradients)


def without_cuts(trials: Trials, records: Sequence[Record]) -> tuple[Record, ...]:
    """The steps that may be to blame for what is wrong in one piece: without those that only mark a cut."""
    staged = trials.staging.last if trials.staging is not None else None
    boundaries = range(len(staged.partition.stages) - 1) if staged is not None else ()
    cuts = {record.index for at in boundaries if staged is not None for record in _cuts(staged, at, records)}
    return tuple(record for record in records if record.index not in cuts)


@dataclass(frozen=True)
class CutFault:
    """What is wrong with the stages, where the schedule agrees without them.

    Args:
        records: the steps that cut at the first place where something else comes; all that cut, if it is not known.
        lines: what else is known.
        plugin: who made the stages.
    """

    records: tuple[Record, ...]
    lines: tuple[str, ...]
    plugin: str | None

    def __str__(self) -> str:
        shown = [f"    {record}" + (f"  ({record.location})" if record.location else "") for record in self.records]
        head = "  the stages do it: in one piece, without the cuts, the same schedule agrees with the untouched model"
        return "\n".join([head, *shown, *(f"  {line}" for line in self.lines)])


def find_cut_fault(
    trials: Trials,
    subject: Subject,
    reference: UntouchedRun,
    records: Sequence[Record],
    *,
    kind: str | None = None,
    error: BaseException | None = None,
) -> CutFault:
    """Where stages go wrong whose schedule agrees in one piece; all ranks call it.

    Args:
        trials: that found it.
        subject: the scheduled model.
        reference: says under which conditions it ran.
        records: the steps.
        kind: of the first difference; None if the stages raise.
        error: what they raise on this rank.
    """
    staging = trials.staging
    assert staging is not None
    place, notes = None, list(getattr(error, "__notes__", ()))
    if kind is not None:
        attempt = trials.world.attempt(lambda: _other_call(trials, staging, subject, reference, kind))
        place = attempt.result if not attempt.failures else None
    seen = trials.world.gather((place, notes))
    place = next((place for place, _ in seen if place is not None), None)
    notes = next((notes for _, notes in seen if notes), [])
    staged = staging.last
    if staged is None:
        return CutFault(tuple(records), tuple(notes), None)
    by = f"stages: from {staged.partition_by} (slapo_partition)"
    lines = [*notes, f"{by}; what passes between them: from {staged.liveness_by} (slapo_liveness)"]
    last = len(staged.partition.stages) - 1
    at = list(range(last))
    if place is not None:
        index = _stage_of(staged, place.path)
        boundary = index if place.in_backward or index is None else index - 1
        at = [boundary] if boundary is not None and 0 <= boundary < last else at
        lines.append(f"first seen at '{place.path}'{_in_stage(index)}: it {place.how}")
    elif kind is not None:
        lines.append("every module gets and gives what it does in one piece: what differs is made between them")
    if place is not None and place.in_backward:
        lines += [line for number in at for line in _without_gradient(staged, number)]
    found = {record.index: record for number in at for record in _cuts(staged, number, records)}
    return CutFault(tuple(found[index] for index in sorted(found)), tuple(lines), staged.partition_by)


def _other_call(
    trials: Trials, staging: Staging, subject: Subject, reference: UntouchedRun, kind: str
) -> OtherCall | None:
    assert staging.last is not None
    ends = [stage.last for stage in staging.last.partition.stages if stage.last is not None]
    looked_through = {".".join(end.split(".")[:depth]) for end in ends for depth in range(1, end.count(".") + 1)}
    stage = "evaluation" if STAGE_OF_KIND[kind] == "evaluation" else "training"
    runs = []
    for each in (dataclasses.replace(trials, staging=None), trials):
        model = subject.make(reference.conditions.dtype)
        course = Course(model, trials.inputs, each.conditions(subject, reference, apart=True))
        if stage == "evaluation":
            course.evaluate()
        course.make_ready()  # before there are hooks, which a plugin may refuse to cut through
        with SeenCalls(course.caller.modules, but=looked_through) as seen:
            course.run((stage,))
        runs.append(seen.calls)
    return first_other_call(*runs)


def _stage_of(staged: Staged, path: str) -> int | None:
    for stage in staged.partition.stages:
        if path in dict(stage.module.named_modules(remove_duplicate=False)):
            return stage.index
    return None


def _in_stage(index: int | None) -> str:
    return "" if index is None else f" in stage {index}"


def _without_gradient(staged: Staged, boundary: int) -> list[str]:
    values = staged.partition.values
    names = [
        name
        for name in staged.liveness.sent(boundary)
        if values[name].dtype.is_floating_point and not values[name].requires_grad
    ]
    sent = ", ".join(f"'{name}'" for name in names)
    return [f"sent from stage {boundary} to stage {boundary + 1} without a gradient: {sent}"] if names else []


def _cuts(staged: Staged, boundary: int, records: Sequence[Record]) -> list[Record]:
    """The steps that ask for a cut, at its module or around it: of the plugin that cuts, or by their namespace."""
    end = staged.partition.stages[boundary].last or ""
    around = [record for record in records if f"{end}.".startswith(f"{record.path}." if record.path else "")]
    distribution = staged.partition_by.partition(" ")[0]
    theirs = [record for record in around if distribution == record.distribution]
    named = [record for record in around if record.name.startswith("pipeline.")]
    return theirs or named or [record for record in around if record.path == end]
