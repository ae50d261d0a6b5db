"""How a search went: how trials ended and why, and the best so far."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slapo_core.spec.sampler import STATUSES, Point, Trial
from slapo_tune.report.words import STARTED

__all__ = ["Reason", "Step", "best_trial", "counts", "course", "reasons"]


@dataclass(frozen=True)
class Reason:
    """Why trials did not end as ``"ok"``.

    Args:
        status: how they ended; ``"refused"`` for points that the space refuses, too.
        reason: the first one's, in words; those that differ in numbers alone count as one.
        count: of trials, or points.
        points: theirs.
    """

    status: str
    reason: str
    count: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Step:
    """The search after a trial that was started.

    Args:
        trial: it.
        started: trials so far that were started, this one too.
        seconds: that all trials so far took, this one too.
        best: value of the best trial so far; None while none was ``"ok"``.
    """

    trial: Trial
    started: int
    seconds: float
    best: float | None


def best_trial(trials: Sequence[Trial]) -> Trial | None:
    """The one with the largest value, the first of equals; None if none was ``"ok"``."""
    fine = [trial for trial in trials if trial.status == "ok" and trial.value is not None]
    return max(fine, key=lambda trial: trial.value or 0.0) if fine else None


def counts(trials: Sequence[Trial]) -> dict[str, int]:
    """How many trials ended how; all of :data:`~slapo_core.spec.sampler.STATUSES`, in their order."""
    return {status: sum(trial.status == status for trial in trials) for status in STATUSES}


def reasons(trials: Sequence[Trial], refused: Sequence[tuple[Point, str]] = ()) -> tuple[Reason, ...]:
    """Why points were not tried, or did not end well: by status in their order, most frequent first.

    Args:
        trials: of the search.
        refused: points that the space itself refuses, and why.
    """
    groups: dict[tuple[str, str], tuple[str, list[Point]]] = {}
    known = [(trial.status, trial.reason, trial.point) for trial in trials if trial.status != "ok"]
    for status, reason, point in (*known, *(("refused", reason, point) for point, reason in refused)):
        first = reason.strip().splitlines()[0] if reason.strip() else "(no reason)"
        groups.setdefault((status, re.sub(r"\d[\d.,]*", "#", first)), (first, []))[1].append(point)
    found = [Reason(status, text, len(points), tuple(points)) for (status, _), (text, points) in groups.items()]
    return tuple(sorted(found, key=lambda reason: (STATUSES.index(reason.status), -reason.count)))


def course(trials: Sequence[Trial]) -> tuple[Step, ...]:
    """The search, trial by trial that was started."""
    steps: list[Step] = []
    seconds, best = 0.0, None
    for trial in trials:
        seconds += trial.seconds
        if trial.status not in STARTED:
            continue
        if trial.status == "ok" and trial.value is not None and (best is None or trial.value > best):
            best = trial.value
        steps.append(Step(trial, len(steps) + 1, seconds, best))
    return tuple(steps)


def as_json(trial: Trial) -> dict[str, object]:
    """A trial, in what JSON has."""
    plain: dict[str, object] = {"number": trial.number, "point": dict(trial.point), "status": trial.status}
    numbers: Mapping[str, Mapping[str, float]] = {"predicted": trial.predicted, "measured": trial.measured}
    plain |= {"value": trial.value, "reason": trial.reason, "seconds": trial.seconds}
    return plain | {name: dict(values) for name, values in numbers.items()}
