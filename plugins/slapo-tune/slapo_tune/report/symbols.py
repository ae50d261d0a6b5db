"""What each symbol of a space does to the value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slapo_core.spec.sampler import Point, Trial
from slapo_tune.report.facts import best_trial
from slapo_tune.report.words import STARTED, same_point

__all__ = ["Effect", "candidates", "effects", "symbols"]


@dataclass(frozen=True)
class Effect:
    """One candidate of one symbol.

    Args:
        symbol: its name.
        candidate: what was chosen.
        points: of the space that have it.
        tried: of them, so many were started.
        ok: of them, so many ended well.
        best: the best trial that has it; None where none ended well.
        share: its value, as a share of the best of all.
    """

    symbol: str
    candidate: Any
    points: int
    tried: int
    ok: int
    best: Trial | None
    share: float | None


def symbols(points: Sequence[Point]) -> tuple[str, ...]:
    """The names, in the order in which they are first chosen; not every point needs to have all of them."""
    return tuple(dict.fromkeys(name for point in points for name in point))


def candidates(points: Sequence[Point], symbol: str) -> tuple[Any, ...]:
    """What is chosen for a symbol anywhere: numbers from small to large, all else in the order of the space."""
    found: dict[str, Any] = {}
    for point in points:
        if symbol in point:
            found.setdefault(same_point({symbol: point[symbol]}), point[symbol])
    values = tuple(found.values())
    numeric = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    return tuple(sorted(values)) if numeric else values


def effects(points: Sequence[Point], trials: Sequence[Trial]) -> tuple[Effect, ...]:
    """For every candidate of every symbol that has several: how often it was tried, and the best that came of it.

    Args:
        points: of the space.
        trials: of the search.
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
