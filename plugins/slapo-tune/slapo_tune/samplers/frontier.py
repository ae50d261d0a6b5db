"""The frontier sampler: along the limit of memory, then by a model of the trials."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slapo_tune.samplers import Point, Sampler, SearchSpace, Trial
from slapo_tune.samplers.coordinate import ascend, best_starts
from slapo_tune.samplers.program import (
    FAILED,
    ReplayedSearch,
    candidates_of,
    key,
    neighbors,
    point_with,
    replay_program,
)

LINE = 3
"""Minimum number of candidates of a symbol along which memory may rise."""


def raised_to_memory_limit(ask: ReplayedSearch, point: Point) -> Point:
    """Return the fitting point with the most memory, among points that differ in one symbol.

    The symbol is the last one along which the predicted memory is monotonic: candidates that depend on earlier choices
    (checkpoint ratios of a batch size) are chosen later.

    Args:
        ask: the search.
        point: the point.

    Returns:
        the point itself without such a symbol or prediction.
    """
    if ask.space.memory is None:
        return point
    for symbol, candidates in reversed(candidates_of(ask.space, point).items()):
        line: list[tuple[int, Point]] = []
        for value in candidates if len(candidates) >= LINE else ():
            other = point_with(ask.space, {**point, symbol: value})
            needs = None if other is None else ask.space.predicted_memory(other)
            if other is not None and needs is not None:
                line.append((needs, other))
        needed = [needs for needs, _ in line]
        if len(line) >= LINE and _is_monotone(needed):
            fitting = [(needs, other) for needs, other in line if ask.fits(other)]
            return max(fitting, key=lambda each: each[0])[1] if fitting else point
    return point


def _is_monotone(needs: list[Any]) -> bool:
    return needs in (sorted(needs), sorted(needs, reverse=True)) and needs[0] != needs[-1]


LENGTH = 0.35
"""Length scale of the kernel, in the range of a symbol."""

UNORDERED = 0.25
"""Kernel value of two different names."""

TOGETHER = 0.3
"""Share of the kernel for joint effects of symbols."""

NOISE = 0.02
"""Noise, as a share of the variance."""

Positions = Mapping[str, Mapping[Any, float | None]]


def normalized_positions(points: Sequence[Point]) -> Positions:
    """Return the relative position of each value in its symbol's range; None for names."""
    values: dict[str, dict[Any, None]] = {}
    for point in points:
        for name, value in point.items():
            values.setdefault(name, {})[value] = None
    found: dict[str, dict[Any, float | None]] = {}
    for name, each in values.items():
        if all(type(value) in (int, float) for value in each):
            last = max(1, len(each) - 1)
            found[name] = {value: index / last for index, value in enumerate(sorted(each))}
        else:
            found[name] = dict.fromkeys(each)
    return found


class GaussianProcess:
    """A Gaussian process of the values of points.

    Args:
        where: position of each value, see `normalized_positions`.
        points: points with a trial.
        values: their values; modeled by logarithms if all are positive.
    """

    def __init__(self, where: Positions, points: Sequence[Point], values: Sequence[float]) -> None:
        self._where, self._points = where, list(points)
        levels = [math.log(value) for value in values] if min(values) > 0 else list(values)
        self._best = max(levels)
        self._mean = sum(levels) / len(levels)
        spread = math.sqrt(sum((level - self._mean) ** 2 for level in levels) / len(levels))
        self._scale = max(spread, 1e-3)
        kernel = [[self._kernel(one, other) for other in points] for one in points]
        covariance = torch.tensor(kernel, dtype=torch.float64) + NOISE * torch.eye(len(points), dtype=torch.float64)
        self._lower = torch.linalg.cholesky(covariance)
        scaled = torch.tensor([[(level - self._mean) / self._scale] for level in levels], dtype=torch.float64)
        self._weights = torch.cholesky_solve(scaled, self._lower)

    def expected_improvement(self, point: Point) -> float:
        """Return the expected improvement of a point over the best one."""
        mean, deviation = self._expected(point)
        if deviation <= 0.0:
            return 0.0
        z = (mean - self._best) / deviation
        return deviation * (z * 0.5 * math.erfc(-z / math.sqrt(2)) + math.exp(-z * z / 2) / math.sqrt(2 * math.pi))

    def _expected(self, point: Point) -> tuple[float, float]:
        """Return mean and standard deviation of a point's value."""
        kernel = torch.tensor([[self._kernel(point, other)] for other in self._points], dtype=torch.float64)
        mean = float(kernel.T @ self._weights)
        half = torch.linalg.solve_triangular(self._lower, kernel, upper=False)
        variance = self._kernel(point, point) - float(half.T @ half)
        return self._mean + self._scale * mean, self._scale * math.sqrt(max(variance, 0.0))

    def _kernel(self, one: Point, other: Point) -> float:
        total, product = 0.0, 1.0
        names = set(one) | set(other)
        for name in names:
            if name not in one or name not in other:
                product *= UNORDERED
                continue
            here, there = self._where[name].get(one[name]), self._where[name].get(other[name])
            if here is None or there is None:
                similarity = 1.0 if one[name] == other[name] else UNORDERED
            else:
                similarity = math.exp(-(((here - there) / LENGTH) ** 2) / 2)
            total += similarity
            product *= similarity
        return (1 - TOGETHER) * total / max(1, len(names)) + TOGETHER * product


STARTS = 3
"""Number of points of the edge tried first."""

COARSE = (3, 1)
"""Numbers of candidates of moves along the edge, in order."""

PATIENCE = 6
"""Trials in a row without an improvement before the search ends."""

POOL = 2000
"""Points evaluated by the model; of a larger space a sample, and neighbors of the best point."""


class Frontier(Sampler):
    """Walk along the limit of memory, then try points by expected improvement.

    The walk assumes that memory buys speed: of points that differ in one symbol (the checkpoint ratio), the fastest is
    the fitting one that needs the most memory. It tries points on this edge, from the best of three starts by
    decreasing steps. Then a Gaussian process of all trials proposes the point of the space with the largest expected
    improvement, until six trials in a row are no improvement. So the search also finds a best point that is not on the
    edge, or without predictions, by more trials.

    Points that do not fit by the estimate are not proposed; a trial that runs out of memory, or needs more than
    predicted, raises further predictions by that factor.
    """

    name = "frontier"

    def suggest(self, space: SearchSpace, history: Sequence[Trial], seed: int) -> Point | None:
        return replay_program(_search, space, history, seed)


def _search(ask: ReplayedSearch) -> None:
    starts = best_starts(ask, STARTS, raised_to_memory_limit)
    if not starts:
        return
    ascend(ask, starts[0], COARSE, adjust=raised_to_memory_limit)
    if _without_gain(ask) < PATIENCE and ask.best is not None:
        point = _promising(ask, [*_pool(ask), *neighbors(ask, ask.best[0])])
        if point is not None:
            ask.value(point)


def _without_gain(ask: ReplayedSearch) -> int:
    """Return the number of started trials after the walk since the last improvement."""
    without = 0
    for trial in ask.others():
        before = FAILED if ask.best is None else ask.best[1]
        if ask.value(trial.point) > before:
            without = 0
        elif trial.status not in ("over_memory", "refused"):
            without += 1
    return without


def _pool(ask: ReplayedSearch) -> list[Point]:
    pool = list(itertools.islice(ask.space.points(), POOL + 1))
    if len(pool) <= POOL:
        return pool
    chance = random.Random(f"pool {ask.seed}")
    sample_point = (ask.space.draw(lambda name, candidates: chance.randrange(len(candidates))) for _ in range(POOL))
    return list({key(point): point for point in sample_point if point is not None}.values())


def _promising(ask: ReplayedSearch, pool: Sequence[Point]) -> Point | None:
    """Return the untried fitting point with the largest expected improvement; None without one."""
    tried = [(point, value) for point, value in ask.points() if value > FAILED]
    points = [point for point, _ in tried]
    model = GaussianProcess(normalized_positions([*pool, *points]), points, [value for _, value in tried])
    left = [point for point in pool if not ask.is_known(point)]
    ranked = sorted(left, key=model.expected_improvement, reverse=True)
    return next((point for point in ranked if ask.fits(point)), None)
