"""Neighbours in a space whose candidates depend on earlier choices."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any

from slapo_core.spec.sampler import Point, SearchSpace
from slapo_tune.samplers.replaying import Asking

__all__ = ["candidates_of", "drawn", "moved", "nearest"]

FEW = 4
"""Candidates of a symbol that may well have no order, e.g. the names of kernels."""

FARTHEST = 4
"""Of how many changes away from a move a point is still taken for that move."""

FAR = 24
"""The same, of changes of one symbol."""

DRAWS = 40
"""Starts that are drawn before a space is walked for one that fits."""


def candidates_of(space: SearchSpace, point: Point) -> dict[str, tuple[Any, ...]]:
    """What each symbol of a point was chosen from."""
    found: dict[str, tuple[Any, ...]] = {}

    def pick(name: str, candidates: tuple[Any, ...]) -> int:
        found[name] = candidates
        return candidates.index(point[name])

    space.draw(pick)
    return found


def drawn(ask: Asking, number: int) -> Point | None:
    """A point that fits and was not asked for, at random; None if there is none.

    Args:
        ask: of the search.
        number: of the start: starts in a row differ in every symbol, so that a few of them see all of its candidates,
            or all parts of their order.
    """
    for attempt in range(DRAWS):
        spread = number if attempt < DRAWS // 2 else ask.random.randrange(10**6)

        def pick(name: str, candidates: tuple[Any, ...], spread: int = spread) -> int:
            if len(candidates) > FEW:
                return ask.random.randrange(len(candidates))
            return (spread + random.Random(f"{ask.seed} {name}").randrange(len(candidates))) % len(candidates)

        point = ask.space.draw(pick)
        if point is not None and not ask.is_known(point) and ask.fits(point):
            return point
    return next((point for point in ask.space.points() if not ask.is_known(point) and ask.fits(point)), None)


def moved(ask: Asking, point: Point, symbol: str, step: int) -> Point | None:
    """The nearest point that fits with ``symbol`` moved along its candidates.

    The other symbols keep their values where they can; where their candidates changed, or the point is refused or does
    not fit, as few of them as possible take a near candidate instead. So a move along the edge of a polygon, or of
    what fits into memory, follows the edge.

    Args:
        ask: of the search.
        point: where from.
        symbol: which is moved.
        step: by how many candidates; further than the last one is the last one.

    Returns:
        None where there is nothing to move to.
    """
    values = candidates_of(ask.space, point)[symbol]
    index = values.index(point[symbol])
    target = min(max(index + step, 0), len(values) - 1)
    if target == index:
        return None
    wanted = {**point, symbol: values[target]}
    return next(nearest(ask, wanted, symbol), None)


def nearest(ask: Asking, wanted: Mapping[str, Any], fixed: str) -> Iterator[Point]:
    """Points that fit, by how much they differ from what is wanted; ``fixed`` has the value that is wanted.

    Args:
        ask: of the search.
        wanted: values that need not be a point.
        fixed: the symbol that is not changed.
    """
    others = [name for name in wanted if name != fixed]
    seen = []
    for changes in range(FAR + 1):
        for split in _splits(changes, len(others), together=changes <= FARTHEST):
            ranks = dict(zip(others, split, strict=True))
            point = _ranked(ask.space, wanted, ranks, fixed)
            if point is not None and point not in seen:
                seen.append(point)
                if ask.fits(point):
                    yield point


def _splits(total: int, parts: int, *, together: bool) -> Iterator[tuple[int, ...]]:
    """All ways to write ``total`` as a sum of so many parts, in a fixed order; or those with one part alone."""
    if not together:
        yield from (tuple(total * (place == part) for place in range(parts)) for part in reversed(range(parts)))
        return
    if parts == 0:
        yield from [()] if total == 0 else []
        return
    for bars in itertools.combinations(range(total + parts - 1), parts - 1):
        edges = (-1, *bars, total + parts - 1)
        yield tuple(after - before - 1 for before, after in itertools.pairwise(edges))


def _ranked(space: SearchSpace, wanted: Mapping[str, Any], ranks: Mapping[str, int], fixed: str) -> Point | None:
    """The point whose symbols take the candidate of that rank, counted by the distance from what is wanted."""
    is_there = True

    def pick(name: str, candidates: tuple[Any, ...]) -> int:
        nonlocal is_there
        if name not in wanted:
            return 0
        rank = ranks.get(name, 0)
        if name == fixed and wanted[name] not in candidates:
            is_there = False
        if rank >= len(candidates):
            is_there = False
            return 0
        return sorted(range(len(candidates)), key=lambda index: _distance(candidates, index, wanted[name]))[rank]

    point = space.draw(pick)
    return point if is_there and point is not None and point.get(fixed) == wanted[fixed] else None


def _distance(candidates: tuple[Any, ...], index: int, value: Any) -> tuple[float, int]:
    if value in candidates:
        return abs(index - candidates.index(value)), index
    numbers = all(type(item) in (int, float) for item in (*candidates, value))
    return (abs(candidates[index] - value) if numbers else index), index
