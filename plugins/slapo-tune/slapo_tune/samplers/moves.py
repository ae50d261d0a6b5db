"""Neighbours in a space whose candidates depend on earlier choices."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any

from slapo_core.spec.sampler import Point, SearchSpace
from slapo_tune.samplers.replaying import Asking

__all__ = ["FEW", "candidates_of", "drawn", "exactly", "moved", "nearest", "neighbours"]

FEW = 4
"""Candidates of a symbol that may well have no order, e.g. the names of kernels."""

FARTHEST = 4
"""Of how many changes away from a move a point is still taken for that move."""

FAR = 24
"""The same, of changes of one symbol."""

DRAWS = 40
"""Starts that are drawn before a space is walked for one that fits."""


def candidates_of(space: SearchSpace, point: Point) -> dict[str, tuple[Any, ...]]:
    """What each symbol of a point was chosen from; nothing of what is no point of the space."""
    found: dict[str, tuple[Any, ...]] = {}
    is_there = True

    def pick(name: str, candidates: tuple[Any, ...]) -> int:
        nonlocal is_there
        found[name] = candidates
        is_there = is_there and name in point and point[name] in candidates
        return candidates.index(point[name]) if is_there else 0

    return found if space.draw(pick) == dict(point) and is_there else {}


def exactly(space: SearchSpace, wanted: Mapping[str, Any]) -> Point | None:
    """The point with these values; None if the space has none."""
    is_there = True

    def pick(name: str, candidates: tuple[Any, ...]) -> int:
        nonlocal is_there
        if name in wanted and wanted[name] in candidates:
            return candidates.index(wanted[name])
        is_there = False
        return 0

    point = space.draw(pick)
    return point if is_there and point == dict(wanted) else None


def drawn(ask: Asking, number: int | None = None) -> Point | None:
    """A point that fits and was not asked for, at random; None if there is none.

    Args:
        ask: of the search.
        number: of the start: starts in a row differ in every symbol with few candidates, so that some of them see all
            of these; None for a point without regard to others.
    """
    for attempt in range(DRAWS):
        spread = number if attempt < DRAWS // 2 else None

        def pick(name: str, candidates: tuple[Any, ...], spread: int | None = spread) -> int:
            if spread is None or len(candidates) > FEW:
                return ask.random.randrange(len(candidates))
            return (spread + random.Random(f"{ask.seed} {name}").randrange(len(candidates))) % len(candidates)

        point = ask.space.draw(pick)
        if point is not None and not ask.is_known(point) and ask.fits(point):
            return point
    return next((point for point in ask.space.points() if not ask.is_known(point) and ask.fits(point)), None)


def neighbours(ask: Asking, point: Point) -> Iterator[Point]:
    """The nearest points that fit with one symbol moved to the candidate before or after."""
    for symbol in point:
        for step in (1, -1):
            other = moved(ask, point, symbol, step)
            if other is not None:
                yield other


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
