"""The best way to cut a row of blocks into contiguous pieces: exact, by dynamic programming."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

__all__ = ["best_cuts", "piece_costs"]

Share = Mapping[Hashable, float]
"""What a block costs, by what it is of: a key that several blocks of one piece have counts once in it."""


def piece_costs(before: Share, blocks: Sequence[Share], after: Share) -> list[list[float]]:
    """The cost of every piece: ``costs[i][j]`` is that of the blocks ``i`` to ``j - 1``, for ``i < j``.

    Args:
        before: what comes before the first block, and so goes into the piece that begins with it.
        blocks: in the order in which they run.
        after: what comes after the last block.
    """
    count = len(blocks)
    costs = [[0.0] * (count + 1) for _ in range(count)]
    for first in range(count):
        seen: set[Hashable] = set()
        total: float = 0
        for end in range(first + 1, count + 1):
            shares = [before] if first == 0 and end == 1 else []
            shares.append(blocks[end - 1])
            if end == count:
                shares.append(after)
            for share in shares:
                for key, cost in share.items():
                    if key not in seen:
                        seen.add(key)
                        total += cost
            costs[first][end] = total
    return costs


def best_cuts(costs: Sequence[Sequence[float]], stages: int) -> tuple[int, ...]:
    """The number of blocks before each cut, e.g. ``(3, 6, 9)`` for 12 equal blocks in 4 stages.

    The largest piece is as small as it can be, and among all cuts of which that is true the sum of the squares is
    smallest: where a huge head decides the largest piece, the others are still balanced.

    Args:
        costs: see :func:`piece_costs`.
        stages: number of pieces, from 1 to the number of blocks.
    """
    largest = _solve(costs, stages, lambda so_far, piece: max(so_far, piece), float("inf"))[0]
    return _solve(costs, stages, lambda so_far, piece: so_far + piece * piece, largest)[1]


def _solve(
    costs: Sequence[Sequence[float]], stages: int, joined: Callable[[float, float], float], limit: float
) -> tuple[float, tuple[int, ...]]:
    """The least joined cost of pieces of at most ``limit`` each, and the cuts that give it; of equals the first."""
    count = len(costs)
    # best[j]: of the first j blocks in as many pieces as the round says
    best: list[tuple[float, tuple[int, ...]] | None] = [(0.0, ()), *[None] * count]
    for stage in range(1, stages + 1):
        following: list[tuple[float, tuple[int, ...]] | None] = [None] * (count + 1)
        for end in range(stage, count + 1):
            for start in range(stage - 1, end):
                left, piece = best[start], costs[start][end]
                if left is None or piece > limit:
                    continue
                total = joined(left[0], piece)
                present = following[end]
                if present is None or total < present[0]:
                    following[end] = (total, (*left[1], start) if stage > 1 else ())
        best = following
    found = best[count]
    assert found is not None, "the limit is the largest piece of some way to cut"
    return found
