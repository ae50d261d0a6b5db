"""Along the edge of what fits into memory, then where the trials so far promise most."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slapo_tune.samplers import Point, Sampler, SearchSpace, Trial
from slapo_tune.samplers.coordinate import ascend, started
from slapo_tune.samplers.program import FAILED, Asking, candidates_of, exactly, key, neighbors, replayed

LINE = 3
"""Candidates that a symbol must have to be told whether memory rises along it."""


def lifted(ask: Asking, point: Point) -> Point:
    """Return the point that fits with the most memory, among those that differ in one symbol alone.

    The symbol is the last one of a point along which the predicted memory rises or falls all the way: candidates that
    depend on earlier choices (checkpoint ratios of a batch size) are chosen after them.

    Args:
        ask: of the search.
        point: which is lifted.

    Returns:
        the point itself where the symbol does not exist, or nothing is predicted.
    """
    if ask.space.memory is None:
        return point
    for symbol, candidates in reversed(candidates_of(ask.space, point).items()):
        line: list[tuple[int, Point]] = []
        for value in candidates if len(candidates) >= LINE else ():
            other = exactly(ask.space, {**point, symbol: value})
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
"""Of the range of a symbol: how far one candidate tells of another."""

UNORDERED = 0.25
"""The same, for two names."""

TOGETHER = 0.3
"""The part of all that symbols do which they do together."""

NOISE = 0.02
"""Of the variance."""

Places = Mapping[str, Mapping[Any, float | None]]


def places(points: Sequence[Point]) -> Places:
    """Return where each value lies between the first and the last one of its symbol, from 0 to 1; None for names."""
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


class Model:
    """Made of points with their values.

    Args:
        where: of every value, see `places`.
        points: that were tried.
        values: of them; their logarithms are modeled where all are larger than 0.
    """

    def __init__(self, where: Places, points: Sequence[Point], values: Sequence[float]) -> None:
        self._where, self._points = where, list(points)
        levels = [math.log(value) for value in values] if min(values) > 0 else list(values)
        self._best = max(levels)
        self._mean = sum(levels) / len(levels)
        spread = math.sqrt(sum((level - self._mean) ** 2 for level in levels) / len(levels))
        self._scale = max(spread, 1e-3)
        alike = [[self._like(one, other) for other in points] for one in points]
        covariance = torch.tensor(alike, dtype=torch.float64) + NOISE * torch.eye(len(points), dtype=torch.float64)
        self._lower = torch.linalg.cholesky(covariance)
        scaled = torch.tensor([[(level - self._mean) / self._scale] for level in levels], dtype=torch.float64)
        self._weights = torch.cholesky_solve(scaled, self._lower)

    def promise(self, point: Point) -> float:
        """Return by how much a point is expected to be better than the best one (expected improvement)."""
        mean, deviation = self._expected(point)
        if deviation <= 0.0:
            return 0.0
        z = (mean - self._best) / deviation
        return deviation * (z * 0.5 * math.erfc(-z / math.sqrt(2)) + math.exp(-z * z / 2) / math.sqrt(2 * math.pi))

    def _expected(self, point: Point) -> tuple[float, float]:
        """The mean and the standard deviation of a point's value."""
        alike = torch.tensor([[self._like(point, other)] for other in self._points], dtype=torch.float64)
        mean = float(alike.T @ self._weights)
        half = torch.linalg.solve_triangular(self._lower, alike, upper=False)
        variance = self._like(point, point) - float(half.T @ half)
        return self._mean + self._scale * mean, self._scale * math.sqrt(max(variance, 0.0))

    def _like(self, one: Point, other: Point) -> float:
        total, product = 0.0, 1.0
        names = set(one) | set(other)
        for name in names:
            if name not in one or name not in other:
                product *= UNORDERED
                continue
            here, there = self._where[name].get(one[name]), self._where[name].get(other[name])
            if here is None or there is None:
                like = 1.0 if one[name] == other[name] else UNORDERED
            else:
                like = math.exp(-(((here - there) / LENGTH) ** 2) / 2)
            total += like
            product *= like
        return (1 - TOGETHER) * total / max(1, len(names)) + TOGETHER * product


STARTS = 3
"""Points of the edge that are tried first."""

COARSE = (3, 1)
"""By how many candidates a symbol is moved along the edge, one after the other."""

PATIENCE = 6
"""Trials in a row that may be no better than the best one before the search ends."""

POOL = 2000
"""Points that the model is asked about; of a larger space these are drawn, and the best one's neighbors."""


class Frontier(Sampler):
    """Walk along the edge of what fits into memory, then look where the trials so far promise most.

    The walk takes for granted that memory buys speed: of points that differ in one symbol alone, say the checkpoint
    ratio, the fastest is the one that needs the most memory and fits. So it tries points on that edge, from the best of
    three starts by smaller and smaller steps. What follows takes nothing for granted: a model of all trials so far says
    which point of the whole space promises most, until six in a row were no better than the best. So the search also
    finds a best point that is not on the edge, or where nothing is predicted; it needs more trials for it.

    Points that the estimate says do not fit are not proposed; a trial that runs out of memory, or needs more than was
    predicted, makes the search that much more careful.
    """

    name = "frontier"

    def suggest(self, space: SearchSpace, history: Sequence[Trial], seed: int) -> Point | None:
        return replayed(_search, space, history, seed)


def _search(ask: Asking) -> None:
    starts = started(ask, STARTS, lifted)
    if not starts:
        return
    ascend(ask, starts[0], COARSE, lift=lifted)
    if _without_gain(ask) < PATIENCE and ask.best is not None:
        point = _promising(ask, [*_pool(ask), *neighbors(ask, ask.best[0])])
        if point is not None:
            ask.value(point)


def _without_gain(ask: Asking) -> int:
    """Of the trials after the walk, how many were started since the last one that was better than all before."""
    without = 0
    for trial in ask.others():
        before = FAILED if ask.best is None else ask.best[1]
        if ask.value(trial.point) > before:
            without = 0
        elif trial.status not in ("over_memory", "refused"):
            without += 1
    return without


def _pool(ask: Asking) -> list[Point]:
    pool = list(itertools.islice(ask.space.points(), POOL + 1))
    if len(pool) <= POOL:
        return pool
    chance = random.Random(f"pool {ask.seed}")
    drawn = (ask.space.draw(lambda name, candidates: chance.randrange(len(candidates))) for _ in range(POOL))
    return list({key(point): point for point in drawn if point is not None}.values())


def _promising(ask: Asking, pool: Sequence[Point]) -> Point | None:
    """The point that fits, was not tried, and promises most; None if there is none."""
    tried = [(point, value) for point, value in ask.points() if value > FAILED]
    points = [point for point, _ in tried]
    model = Model(places([*pool, *points]), points, [value for _, value in tried])
    left = [point for point in pool if not ask.is_known(point)]
    ranked = sorted(left, key=model.promise, reverse=True)
    return next((point for point in ranked if ask.fits(point)), None)
