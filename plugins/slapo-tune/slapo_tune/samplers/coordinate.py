"""Coordinate ascent of the value, and the paper's randomized coordinate descent, with several starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from slapo_tune.samplers import Point, Sampler, SearchSpace, Trial
from slapo_tune.samplers.program import FAILED, FEW, Asking, candidates_of, drawn, moved, replayed

Lift = Callable[[Asking, Point], Point]


def as_it_is(ask: Asking, point: Point) -> Point:
    """Return the point as it is."""
    return point


def started(ask: Asking, count: int, lift: Lift = as_it_is) -> list[Point]:
    """Ask for points spread over the space until ``count`` have a value; the best first.

    Args:
        ask: of the search.
        count: how many.
        lift: done to each point first.
    """
    values: list[tuple[float, Point]] = []
    number = 0
    while len(values) < count and (point := drawn(ask, number)) is not None:
        number += 1
        better = lift(ask, point)
        point = point if ask.is_known(better) else better
        value = ask.value(point)
        if value > FAILED:
            values.append((value, point))
    values.sort(key=lambda each: -each[0])  # those of one value stay in order
    return [point for _, point in values]


def ascend(ask: Asking, start: Point, steps: Iterable[int] = (1,), *, few: int = 1, lift: Lift = as_it_is) -> Point:
    """Move one symbol after the other, in random order, until no move helps.

    A move that helps is made again, twice as far each time, while it goes on helping.

    Args:
        ask: of the search.
        start: where from; its value is asked for.
        steps: by how many candidates a symbol is moved at first; each one is tried until none of its moves helps.
        few: symbols with at most this number of candidates are tried at each of them.
        lift: done to each point first.

    Returns:
        a point that no move by the last of the steps makes better.
    """
    point, best = start, ask.value(start)
    for step in steps:
        moves = _moves(ask, point, step, few)
        while moves:
            symbol, by = moves.pop()
            other, value = _farthest(ask, point, symbol, by, best, lift)
            if other is not None:
                point, best = other, value
                moves = _moves(ask, point, step, few)
    return point


def _farthest(ask: Asking, point: Point, symbol: str, by: int, best: float, lift: Lift) -> tuple[Point | None, float]:
    """The last of the growing moves that helps, and its value; None if the first one does not."""
    reached = None
    while symbol in point and (target := moved(ask, point, symbol, by)) is not None:
        other = lift(ask, target)
        if other == point or (value := ask.value(other)) <= best:
            break
        point, reached, best = other, other, value
        by *= 2
    return reached, best


def _moves(ask: Asking, point: Point, step: int, few: int) -> list[tuple[str, int]]:
    moves = []
    for symbol, candidates in candidates_of(ask.space, point).items():
        lengths = range(1, len(candidates)) if len(candidates) <= few else (step,)
        moves += [(symbol, way * length) for length in lengths for way in (1, -1)]
    ask.random.shuffle(moves)
    return moves


STARTS = 4
"""Points that are tried first."""

TAKEN = 2
"""Of these, the best ones: a descent starts at each."""

LAST = (2, 1)
"""By how many candidates the symbols of the best point are moved at last."""


class Coordinate(Sampler):
    """Randomized coordinate descent (Nesterov, 2012), as in the paper (section 3.4), with several starts.

    Four points spread over the space are tried; from the best two of them one symbol after the other is moved to its
    next candidates, in random order, while that helps, and farther while it goes on helping. At last the best point's
    symbols are moved by two candidates and by one, and those with at most four candidates to each of them; the search
    ends where none of it helps. A move to what does not fit into memory, or is refused, changes the other symbols as
    little as possible, so it follows the edge of the space.
    """

    name = "coordinate"

    def suggest(self, space: SearchSpace, history: Sequence[Trial], seed: int) -> Point | None:
        return replayed(_search, space, history, seed)


def _search(ask: Asking) -> None:
    for point in started(ask, STARTS)[:TAKEN]:
        ascend(ask, point)
    if ask.best is not None:
        ascend(ask, ask.best[0], LAST, few=FEW)
