"""What trials so far say about the other points: a Gaussian process on the logarithm of the value.

Its covariance is a sum over the symbols, so that what a batch size or a kernel does is learned from all points that
share it, and a product over all of them, for what they do together (Duvenaud et al.,
Additive Gaussian processes, 2011).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from slapo_core.spec.sampler import Point

__all__ = ["Model", "places"]

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
    """Where each value lies between the first and the last one of its symbol, from 0 to 1; None for names."""
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
        values: of them; their logarithms are modelled where all are larger than 0.
    """

    def __init__(self, where: Places, points: Sequence[Point], values: Sequence[float]) -> None:
        self._where, self._points = where, list(points)
        levels = [math.log(value) for value in values] if min(values) > 0 else list(values)
        self._best = max(levels)
        self._mean = sum(levels) / len(levels)
        spread = math.sqrt(sum((level - self._mean) ** 2 for level in levels) / len(levels))
        self._scale = max(spread, 1e-3)
        size = range(len(points))
        self._lower = _cholesky(
            [[self._like(points[a], points[b]) + NOISE * (a == b) for b in range(a + 1)] for a in size]
        )
        self._weights = _backward(
            self._lower, _forward(self._lower, [(level - self._mean) / self._scale for level in levels])
        )

    def promise(self, point: Point) -> float:
        """By how much a point is expected to be better than the best one (expected improvement)."""
        mean, deviation = self._expected(point)
        if deviation <= 0.0:
            return 0.0
        z = (mean - self._best) / deviation
        return deviation * (z * 0.5 * math.erfc(-z / math.sqrt(2)) + math.exp(-z * z / 2) / math.sqrt(2 * math.pi))

    def _expected(self, point: Point) -> tuple[float, float]:
        """The mean and the standard deviation of a point's value."""
        alike = [self._like(point, other) for other in self._points]
        mean = sum(weight * like for weight, like in zip(self._weights, alike, strict=True))
        half = _forward(self._lower, alike)
        variance = self._like(point, point) - sum(part * part for part in half)
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


def _cholesky(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    lower: list[list[float]] = []
    for a, row in enumerate(rows):
        line: list[float] = []
        for b in range(a):
            line.append((row[b] - sum(x * y for x, y in zip(line, lower[b], strict=False))) / lower[b][b])
        line.append(math.sqrt(max(row[a] - sum(x * x for x in line), 1e-12)))
        lower.append(line)
    return lower


def _forward(lower: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    found: list[float] = []
    for line, value in zip(lower, right, strict=True):
        found.append((value - sum(x * y for x, y in zip(line, found, strict=False))) / line[-1])
    return found


def _backward(lower: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    size = len(lower)
    found = [0.0] * size
    for a in reversed(range(size)):
        found[a] = (right[a] - sum(lower[b][a] * found[b] for b in range(a + 1, size))) / lower[a][a]
    return found
