"""Coordinate ascent of the value, and the paper's randomized coordinate descent, with several starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from slapo_tune.samplers import Point, Sampler, SearchSpace, Trial
from slapo_tune.samplers.program import FAILED, FEW, ReplayedSearch, candidates_of, move, replay_program, sample_point

Adjustment = Callable[[ReplayedSearch, Point], Point]


def unchanged(ask: ReplayedSearch, point: Point) -> Point:
    """Return the point as it is."""
    return point


def best_starts(ask: ReplayedSearch, count: int, adjust: Adjustment = unchanged) -> list[Point]:
    """Try points spread over the space until ``count`` have a value; return them, the best first.

    Args:
        ask: the search.
        count: number of points.
        adjust: applied to each point first.
    """
    values: list[tuple[float, Point]] = []
    number = 0
    while len(values) < count and (point := sample_point(ask, number)) is not None:
        number += 1
        better = adjust(ask, point)
        point = point if ask.is_known(better) else better
        value = ask.value(point)
        if value > FAILED:
            values.append((value, point))
    values.sort(key=lambda each: -each[0])  # stable: equal values keep their order
    return [point for _, point in values]


def ascend(
    ask: ReplayedSearch, start: Point, steps: Iterable[int] = (1,), *, few: int = 1, adjust: Adjustment = unchanged
) -> Point:
    """Move one symbol at a time, in random order, until no move helps.

    A move that helps is repeated, twice as far each time, as long as it helps.

    Args:
        ask: the search.
        start: the first point.
        steps: numbers of candidates of a first move; each is used until no move helps.
        few: for symbols with at most this number of candidates each candidate is tried.
        adjust: applied to each point first.

    Returns:
        a point that no move by the last of the steps improves.
    """
    point, best = start, ask.value(start)
    for step in steps:
        moves = _moves(ask, point, step, few)
        while moves:
            symbol, by = moves.pop()
            other, value = _farthest(ask, point, symbol, by, best, adjust)
            if other is not None:
                point, best = other, value
                moves = _moves(ask, point, step, few)
    return point


def _farthest(
    ask: ReplayedSearch, point: Point, symbol: str, by: int, best: float, adjust: Adjustment
) -> tuple[Point | None, float]:
    """Return the last growing move that helps, and its value; None if none helps."""
    reached = None
    while symbol in point and (target := move(ask, point, symbol, by)) is not None:
        other = adjust(ask, target)
        if other == point or (value := ask.value(other)) <= best:
            break
        point, reached, best = other, other, value
        by *= 2
    return reached, best


def _moves(ask: ReplayedSearch, point: Point, step: int, few: int) -> list[tuple[str, int]]:
    moves = []
    for symbol, candidates in candidates_of(ask.space, point).items():
        lengths = range(1, len(candidates)) if len(candidates) <= few else (step,)
        moves += [(symbol, way * length) for length in lengths for way in (1, -1)]
    ask.random.shuffle(moves)
    return moves


STARTS = 4
"""Number of points tried first."""

TAKEN = 2
"""Number of the best of them from which a descent starts."""

LAST = (2, 1)
"""Numbers of candidates of the last moves, from the best point."""


class Coordinate(Sampler):
    """Randomized coordinate descent (Nesterov, 2012), as in the paper (section 3.4), with several starts.

    Tries four points spread over the space. From the best two of them it moves one symbol at a time to its next
    candidates, in random order, as long as that helps, and farther while a move helps. Finally it moves the best
    point's symbols by two candidates and by one, and symbols with at most four candidates to each of them; the search
    ends when no move helps. If a move does not fit into memory or is refused, the other symbols change as little as
    possible, so that the move follows the edge of the space.
    """

    name = "coordinate"

    def suggest(self, space: SearchSpace, history: Sequence[Trial], seed: int) -> Point | None:
        return replay_program(_search, space, history, seed)


def _search(ask: ReplayedSearch) -> None:
    for point in best_starts(ask, STARTS)[:TAKEN]:
        ascend(ask, point)
    if ask.best is not None:
        ascend(ask, ask.best[0], LAST, few=FEW)
