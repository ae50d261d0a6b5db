"""What was predicted against what was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from slapo_core.spec.sampler import Trial

__all__ = ["Agreement", "agreement", "pairs", "rank_correlation"]


@dataclass(frozen=True)
class Agreement:
    """How well one prediction holds.

    Args:
        what: ``"memory"`` or ``"time"``.
        count: trials that have both numbers.
        ratio: the median of predicted / measured.
        lowest: of these ratios.
        highest: of these ratios.
        correlation: Spearman's rank correlation; None of fewer than three trials, or where all are equal.
    """

    what: str
    count: int
    ratio: float
    lowest: float
    highest: float
    correlation: float | None


def pairs(trials: Sequence[Trial], what: str) -> list[tuple[float, float]]:
    """Predicted and measured, of every trial that has both.

    Args:
        trials: of the search.
        what: ``"memory"`` (bytes) or ``"time"`` (seconds).
    """
    return [
        (trial.predicted[what], trial.measured[what])
        for trial in trials
        if trial.status == "ok" and trial.predicted.get(what) and trial.measured.get(what)
    ]


def agreement(trials: Sequence[Trial], what: str) -> Agreement | None:
    """How well a prediction holds; None where no trial has both numbers.

    Args:
        trials: of the search.
        what: ``"memory"`` or ``"time"``.
    """
    both = pairs(trials, what)
    if not both:
        return None
    ratios = [predicted / measured for predicted, measured in both]
    correlation = rank_correlation([one for one, _ in both], [other for _, other in both])
    return Agreement(what, len(both), statistics.median(ratios), min(ratios), max(ratios), correlation)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's: 1 where both put everything in the same order, -1 in the opposite one; equals share their rank.

    Args:
        first: numbers.
        second: as many.

    Returns:
        None of fewer than three, or where all numbers of one side are equal.
    """
    if len(first) < 3:
        return None
    ranks, others = _ranks(first), _ranks(second)
    middle = (len(first) + 1) / 2
    spread = math.sqrt(sum((rank - middle) ** 2 for rank in ranks) * sum((rank - middle) ** 2 for rank in others))
    if spread == 0:
        return None
    return sum((a - middle) * (b - middle) for a, b in zip(ranks, others, strict=True)) / spread


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    places: dict[float, list[int]] = {}
    for place, value in enumerate(ordered, start=1):
        places.setdefault(value, []).append(place)
    return [statistics.mean(places[value]) for value in values]
