"""`StudyReport`: the results of a search, as tables and as data."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slapo_core import cli
from slapo_runtime.sizes import format_bytes
from slapo_tune.samplers import STATUSES, Point, Trial

STARTED = ("ok", "oom", "timeout", "crash", "wrong")
"""Statuses of trials that ran; trials of other statuses were pruned."""


def number(value: float) -> str:
    """Format a number with four significant digits: ``"312.4"``, ``"0.01234"``, ``"1.234e+07"``."""
    return f"{value:.4g}" if abs(value) < 1e4 or abs(value) >= 1e7 else f"{value:,.0f}"


def choice(value: Any) -> str:
    """Format a candidate, e.g. ``0.5``, ``flash``, ``(1, 2)``."""
    return value if isinstance(value, str) else f"{value:.4g}" if isinstance(value, float) else str(value)


def point_words(point: Mapping[str, Any]) -> str:
    """Format a point on one line: ``batch=32 checkpoint=0.5 tp=1``."""
    return " ".join(f"{name}={choice(value)}" for name, value in point.items())


def duration(seconds: float) -> str:
    """Format a duration: ``"8 s"``, ``"3 min 20 s"``, ``"2 h 5 min"``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60} min"


def same_point(point: Mapping[str, Any]) -> str:
    """Return a key that is equal for equal points, also for points read from JSON."""
    return json.dumps(dict(point), sort_keys=True)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table under a title; nothing without rows."""
    if rows:
        print(f"\n{title}")
        cli.print_table(columns, rows)


@dataclass(frozen=True)
class Reason:
    """Why trials did not end as ``"ok"``.

    Args:
        status: their status; also ``"refused"`` for points that the space refuses.
        reason: the reason of the first one; reasons that differ in numbers only count as one.
        count: number of trials or points.
        points: the points.
    """

    status: str
    reason: str
    count: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class SearchStep:
    """The state of a search after a started trial.

    Args:
        trial: the trial.
        started: number of started trials so far, with this one.
        seconds: seconds of all trials so far, with this one.
        best: value of the best trial so far; None before the first ``"ok"``.
    """

    trial: Trial
    started: int
    seconds: float
    best: float | None


def best_trial(trials: Sequence[Trial]) -> Trial | None:
    """Return the trial with the largest value, the first of equal ones; None without an ``"ok"``."""
    fine = [trial for trial in trials if trial.status == "ok" and trial.value is not None]
    return max(fine, key=lambda trial: trial.value or 0.0) if fine else None


def reasons(trials: Sequence[Trial], refused: Sequence[tuple[Point, str]] = ()) -> tuple[Reason, ...]:
    """Group trials that were not ``"ok"`` by status and reason, the most frequent reason first.

    Args:
        trials: trials of the search.
        refused: points that the space refuses, with reasons.
    """
    groups: dict[tuple[str, str], tuple[str, list[Point]]] = {}
    known = [(trial.status, trial.reason, trial.point) for trial in trials if trial.status != "ok"]
    for status, reason, point in (*known, *(("refused", reason, point) for point, reason in refused)):
        first = reason.strip().splitlines()[0] if reason.strip() else "(no reason)"
        groups.setdefault((status, re.sub(r"\d[\d.,]*", "#", first)), (first, []))[1].append(point)
    found = [Reason(status, text, len(points), tuple(points)) for (status, _), (text, points) in groups.items()]
    return tuple(sorted(found, key=lambda reason: (STATUSES.index(reason.status), -reason.count)))


def search_steps(trials: Sequence[Trial]) -> tuple[SearchStep, ...]:
    """Return the state of the search after each started trial."""
    steps: list[SearchStep] = []
    seconds, best = 0.0, None
    for trial in trials:
        seconds += trial.seconds
        if trial.status not in STARTED:
            continue
        if trial.status == "ok" and trial.value is not None and (best is None or trial.value > best):
            best = trial.value
        steps.append(SearchStep(trial, len(steps) + 1, seconds, best))
    return tuple(steps)


@dataclass(frozen=True)
class Effect:
    """The results of one candidate.

    Args:
        symbol: name of the symbol.
        candidate: the candidate.
        points: number of points with it.
        tried: number of started trials with it.
        ok: number of ``"ok"`` trials with it.
        best: the best trial with it; None without an ``"ok"``.
        share: value of that trial, as a share of the best value of all.
    """

    symbol: str
    candidate: Any
    points: int
    tried: int
    ok: int
    best: Trial | None
    share: float | None


def symbols(points: Sequence[Point]) -> tuple[str, ...]:
    """Return the symbols of points, in order of first choice; points may lack symbols."""
    return tuple(dict.fromkeys(name for point in points for name in point))


def candidates(points: Sequence[Point], symbol: str) -> tuple[Any, ...]:
    """Return the candidates of a symbol: numbers ascending, others in the order of the space."""
    found: dict[str, Any] = {}
    for point in points:
        if symbol in point:
            found.setdefault(same_point({symbol: point[symbol]}), point[symbol])
    values = tuple(found.values())
    numeric = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    return tuple(sorted(values)) if numeric else values


def effects(points: Sequence[Point], trials: Sequence[Trial]) -> tuple[Effect, ...]:
    """Return the results of each candidate, for symbols with several candidates.

    Args:
        points: points of the space.
        trials: trials of the search.
    """
    winner = best_trial(trials)
    found: list[Effect] = []
    for symbol in symbols(points):
        values = candidates(points, symbol)
        if len(values) < 2:
            continue
        for value in values:
            having = [trial for trial in trials if _has(trial.point, symbol, value)]
            best = best_trial(having)
            share = best.value / winner.value if best and winner and best.value and winner.value else None
            tried = sum(trial.status in STARTED for trial in having)
            ok = sum(trial.status == "ok" for trial in having)
            count = sum(_has(point, symbol, value) for point in points)
            found.append(Effect(symbol, value, count, tried, ok, best, share))
    return tuple(found)


def _has(point: Point, symbol: str, value: Any) -> bool:
    return symbol in point and same_point({symbol: point[symbol]}) == same_point({symbol: value})


@dataclass(frozen=True)
class Agreement:
    """Predictions compared with measurements.

    Args:
        what: ``"memory"`` or ``"time"``.
        count: number of trials with both numbers.
        ratio: median of predicted / measured.
        lowest: minimum of these ratios.
        highest: maximum of these ratios.
        correlation: Spearman's rank correlation; None for fewer than three trials, or equal numbers.
    """

    what: str
    count: int
    ratio: float
    lowest: float
    highest: float
    correlation: float | None


def pairs(trials: Sequence[Trial], what: str) -> list[tuple[float, float]]:
    """Return the predicted and measured numbers of trials with both.

    Args:
        trials: trials of the search.
        what: ``"memory"`` (bytes) or ``"time"`` (seconds).
    """
    return [
        (trial.predicted[what], trial.measured[what])
        for trial in trials
        if trial.status == "ok" and trial.predicted.get(what) and trial.measured.get(what)
    ]


def agreement(trials: Sequence[Trial], what: str) -> Agreement | None:
    """Compare predictions with measurements; None without a trial that has both.

    Args:
        trials: trials of the search.
        what: ``"memory"`` or ``"time"``.
    """
    both = pairs(trials, what)
    if not both:
        return None
    ratios = [predicted / measured for predicted, measured in both]
    correlation = rank_correlation([one for one, _ in both], [other for _, other in both])
    return Agreement(what, len(both), statistics.median(ratios), min(ratios), max(ratios), correlation)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation; equal numbers share their rank.

    Args:
        first: numbers.
        second: as many numbers.

    Returns:
        the correlation; None for fewer than three pairs, or if all numbers of one side are equal.
    """
    if len(first) < 3:
        return None
    try:
        return statistics.correlation(_ranks(first), _ranks(second))
    except statistics.StatisticsError:  # all are equal
        return None


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    places: dict[float, list[int]] = {}
    for place, value in enumerate(ordered, start=1):
        places.setdefault(value, []).append(place)
    return [statistics.mean(places[value]) for value in values]


@dataclass(frozen=True)
class StudyReport:
    """The results of a search.

    Args:
        points: points of the space.
        trials: trials of the search, oldest first.
        refused: points that the space refuses, with reasons.
        unit: unit of the value.
    """

    points: Sequence[Point]
    trials: Sequence[Trial]
    refused: Sequence[tuple[Point, str]] = ()
    unit: str = "samples/s"

    @property
    def best(self) -> Trial | None:
        """Return the best trial; None without an ``"ok"``."""
        return best_trial(self.trials)

    @property
    def statuses(self) -> dict[str, int]:
        """Count trials by status, in the order of :data:`~slapo_tune.samplers.STATUSES`."""
        return {status: sum(trial.status == status for trial in self.trials) for status in STATUSES}

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Return why trials were not ``"ok"``."""
        return reasons(self.trials, self.refused)

    @property
    def untried(self) -> int:
        """Count the points without a trial."""
        known = {same_point(trial.point) for trial in self.trials}
        return sum(same_point(point) not in known for point in self.points)

    @property
    def seconds(self) -> float:
        """Return the seconds of all trials."""
        return sum(trial.seconds for trial in self.trials)

    @property
    def agreements(self) -> tuple[Agreement, ...]:
        """Compare predictions with measurements."""
        found = [agreement(self.trials, what) for what in ("memory", "time")]
        return tuple(one for one in found if one is not None)

    @property
    def effects(self) -> tuple[Effect, ...]:
        """Return the results of each candidate."""
        return effects(self.points, self.trials)

    def as_json(self) -> dict[str, Any]:
        """Convert to plain data, for ``json.dump``."""
        steps = [
            {"best": step.best, "seconds": step.seconds, "started": step.started, "value": step.trial.value}
            | {"number": step.trial.number}
            for step in search_steps(self.trials)
        ]
        symbols = [
            asdict(one)
            | {"best": one.best.value if one.best else None, "number": one.best.number if one.best else None}
            for one in self.effects
        ]
        return {
            "best": asdict(self.best) if self.best else None,
            "course": steps,
            "prediction": {one.what: asdict(one) for one in self.agreements},
            "reasons": [asdict(one) for one in self.reasons],
            "seconds": self.seconds,
            "space": {"points": len(self.points), "refused": len(self.refused), "untried": self.untried},
            "statuses": self.statuses,
            "symbols": symbols,
            "trials": [asdict(trial) for trial in self.trials],
            "unit": self.unit,
        }

    def summary(self) -> str:
        """Return two lines: numbers of points and trials, and the best trial."""
        started = len(search_steps(self.trials))
        lines = [
            f"{len(self.points)} points ({len(self.refused)} more refused by the space); {started} started, "
            f"{len(self.trials) - started} pruned, {self.untried} not tried; {duration(self.seconds)} in trials"
        ]
        if self.best is None:
            lines.append("no trial was ok")
        else:
            lines.append(
                f"best  {number(self.best.value or 0.0)} {self.unit}  {point_words(self.best.point)}"
                f"  (trial {self.best.number})"
            )
        return "\n".join(lines)

    def print(self, *, top: int = 10) -> None:
        """Print the tables.

        Args:
            top: number of best trials.
        """
        print(self.summary())
        fine = sorted((trial for trial in self.trials if trial.status == "ok"), key=lambda trial: -(trial.value or 0.0))
        title = f"best {min(top, len(fine))} of {len(fine)} ok trials"
        print_table(title, _TRIAL_COLUMNS, [trial_row(trial, self.unit) for trial in fine[:top]])
        statuses = [(status, str(count)) for status, count in self.statuses.items() if count]
        print_table("trials by status", ("STATUS", "COUNT"), statuses)
        rows = [(one.status, str(one.count), one.reason, point_words(one.points[0])) for one in self.reasons]
        print_table("reasons of the other statuses", ("STATUS", "COUNT", "REASON", "E.G."), rows)
        print_table(
            "predicted / measured",
            ("WHAT", "TRIALS", "MEDIAN", "LOWEST", "HIGHEST", "RANK CORRELATION"),
            [_agreement_row(one) for one in self.agreements],
        )
        print_table(
            "results by candidate",
            ("SYMBOL", "CANDIDATE", "TRIED", f"BEST {self.unit}", "OF BEST", "WITH"),
            [_effect_row(one) for one in self.effects],
        )


_TRIAL_COLUMNS = ("TRIAL", "VALUE", "STEP", "MEMORY", "PREDICTED", "POINT")


def trial_row(trial: Trial, unit: str) -> tuple[str, ...]:
    """Format a trial, for :data:`_TRIAL_COLUMNS`."""
    time, memory = trial.measured.get("time"), trial.measured.get("memory")
    predicted = trial.predicted.get("memory")
    return (
        str(trial.number),
        f"{number(trial.value)} {unit}" if trial.value is not None else trial.status,
        f"{time * 1e3:.4g} ms" if time else "",
        format_bytes(int(memory)) if memory else "",
        format_bytes(int(predicted)) if predicted else "",
        point_words(trial.point),
    )


def _agreement_row(one: Agreement) -> tuple[str, ...]:
    correlation = "" if one.correlation is None else f"{one.correlation:.3f}"
    return (one.what, str(one.count), f"{one.ratio:.3f}", f"{one.lowest:.3f}", f"{one.highest:.3f}", correlation)


def _effect_row(one: Effect) -> tuple[str, ...]:
    best = number(one.best.value) if one.best and one.best.value is not None else ""
    rest = {name: value for name, value in one.best.point.items() if name != one.symbol} if one.best else {}
    share = "" if one.share is None else f"{100 * one.share:.1f} %"
    return (one.symbol, choice(one.candidate), f"{one.tried} of {one.points}", best, share, point_words(rest))
