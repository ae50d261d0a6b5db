"""Check exact steps without the approximate ones, whose tolerance could hide mistakes.

A step that promises APPROXIMATE loosens the comparison of the entire model. So the schedule is run once more without
such steps. The rest may depend on them, though: a sync whose shard is inside of a replaced module is wrong without it.
Where the rest does not agree, ever more steps around the approximate ones are left out too; and a difference counts
only if the loose tolerance would have hidden it, and if the steps that were left out agree on their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slapo_core.internals import fold_numbers
from slapo_verify.compare import Tolerance
from slapo_verify.kinds import EARLY
from slapo_verify.search import is_below
from slapo_verify.trials import ReferenceRun, ScheduleTrials, TrialResult

if TYPE_CHECKING:
    from slapo_core.primitive import Record


_LEVELS = 4  # trials: without the approximate steps; those below them; below their parents; above those


@dataclass(frozen=True)
class Hidden:
    """Describe the outcome of the other steps.

    Args:
        rest: the steps that were run.
        left_out: the others.
        found: where they differ from the reference model; None if they agree.
        reference: the reference run that they were compared with.
        note: which steps were judged with the loose tolerance only; "" if none of those that promise more.
    """

    rest: tuple[Record, ...]
    left_out: tuple[Record, ...]
    found: TrialResult | None
    reference: ReferenceRun
    note: str = ""


def without_approximate_steps(
    trials: ScheduleTrials, reference: ReferenceRun, records: Sequence[Record]
) -> Hidden | None:
    """Check the exact steps under their own promises; None without looser ones.

    All ranks call it, and get the same answer.

    Args:
        trials: runs parts of the schedule.
        reference: its run, with which the full schedule agreed.
        records: all steps of the schedule.
    """
    loose = tuple(record for record in records if _is_loose(record))
    strict = tuple(record for record in records if not _is_loose(record))
    given, exact = (trials.tolerance(reference, part) for part in (records, strict))
    if not loose or not strict or (given.rtol <= exact.rtol and given.atol <= exact.atol):
        return None
    reference_model = trials.again(reference, EARLY)
    for level, rest in enumerate(_parts(strict, loose)):
        others = _others(records, rest)
        tried = trials.try_steps(reference_model, EARLY, rest)
        if tried.agrees:
            return Hidden(rest, others, None, reference_model, _note(strict, rest, loose))
        if level == 0 or tried.first is None:
            continue  # a step at a replaced module may be meant for the replacement
        if not trials.try_steps(reference_model, EARLY, rest, promises=records).agrees:
            continue  # with the approximate steps it agrees, so it needs them
        if trials.try_steps(reference_model, EARLY, others).agrees:
            return Hidden(rest, others, tried, reference_model)
    return Hidden((), tuple(records), None, reference_model, _note(strict, (), loose))


def _is_loose(record: Record) -> bool:
    promise = record.primitive.equivalence
    return promise.rtol > 0 or promise.atol > 0


_ROUGH = 0.1  # of the largest element


def loose(
    records: Sequence[Record], tolerance: Tolerance, element: float, strict: Sequence[Record], *, given: bool
) -> str:
    """Describe what a tolerance of a tenth of the largest element, or more, says nothing about; "" for less.

    Args:
        records: all steps of the schedule.
        tolerance: of their comparison.
        element: the largest of the outputs.
        strict: the steps that were compared once more without the approximate ones.
        given: whether the user gave the tolerance.
    """
    share = tolerance.rtol + (tolerance.atol / element if element else 0.0)
    unknown = tuple(record for record in records if given or _is_loose(record))
    if share < _ROUGH or not unknown:
        return ""
    which = f"#{fold_numbers([record.index for record in unknown])}"
    others = f"; without {'it' if len(unknown) == 1 else 'them'}, the rest agrees" if strict and not given else ""
    return f"within {100 * share:.0f} % of the largest element: the numbers say nothing about {which}{others}"


def _parts(strict: Sequence[Record], loose: Sequence[Record]) -> Iterator[tuple[Record, ...]]:
    """Yield the exact steps; then also without the ones below ever higher modules."""
    places = [record.path for record in loose]
    yield tuple(strict)
    for _ in range(_LEVELS - 1):
        rest = tuple(record for record in strict if not any(is_below(record.path, place) for place in places))
        if not rest:
            return
        yield rest
        places = [place.rpartition(".")[0] for place in places]


def _others(records: Sequence[Record], rest: Sequence[Record]) -> tuple[Record, ...]:
    kept = {record.index for record in rest}
    return tuple(record for record in records if record.index not in kept)


def _note(strict: Sequence[Record], rest: Sequence[Record], loose: Sequence[Record]) -> str:
    dropped = _others(strict, rest)
    if not dropped:
        return ""
    because = ", ".join(f"#{record.index} at {record.path!r}" for record in loose)
    which = ", ".join(f"#{record.index} {record.primitive.name} at {record.path!r}" for record in dropped)
    return (
        f"judged only with the tolerance of the approximate steps ({because}), without which they do not agree: {which}"
    )
