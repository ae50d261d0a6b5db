"""Coordinate ascent of throughput: one symbol at a time, by steps that grow while they help."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from slapo_core.spec.sampler import Point
from slapo_tune.samplers.moves import candidates_of, moved
from slapo_tune.samplers.replaying import Asking

__all__ = ["ascend"]

FEW = 1
"""Candidates of a symbol that are all tried: few of them may well have no order, e.g. the names of kernels."""


def ascend(
    ask: Asking,
    start: Point,
    steps: Iterable[int] = (1,),
    few: int = FEW,
    lift: Callable[[Point], Point] = lambda point: point,
) -> Point:
    """Move one symbol after the other, in random order, until no move helps.

    A move that helps is made again, twice as far each time, while it goes on helping.

    Args:
        ask: of the search.
        start: where from; its value is asked for.
        steps: by how many candidates a symbol is moved at first; each one is tried until none of its moves helps.
        few: symbols with at most so many candidates are tried at each of them.

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


def _farthest(ask: Asking, point: Point, symbol: str, by: int, best: float, lift: Callable[[Point], Point]) -> tuple[Point | None, float]:
    """The last of the growing moves that helps, and its value; None if the first one does not."""
    reached = None
    while symbol in point and (other := moved(ask, point, symbol, by)) is not None:
        other = lift(other)
        if other == point:
            break
        value = ask.value(other)
        if value <= best:
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
