"""The edge of what fits into memory."""

from __future__ import annotations

from typing import Any

from slapo_core.spec.sampler import Point
from slapo_tune.samplers.moves import candidates_of, exactly
from slapo_tune.samplers.replaying import Asking

__all__ = ["lifted"]

LINE = 3
"""Candidates that a symbol must have to be told whether memory rises along it."""


def lifted(ask: Asking, point: Point) -> Point:
    """The point that fits with the most memory, among those that differ in one symbol alone.

    The symbol is the last one of a point along which the predicted memory rises or falls all the way: candidates that
    are made from earlier choices, such as the checkpoint ratios of a batch size, are chosen after them.

    Args:
        ask: of the search.
        point: which is lifted.

    Returns:
        the point itself where there is no such symbol, or nothing is predicted.
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
