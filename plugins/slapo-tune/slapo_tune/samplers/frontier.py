"""Along the edge of what fits into memory."""

from __future__ import annotations

from collections.abc import Sequence

from slapo_core import Sampler
from slapo_core.spec.sampler import Point, SearchSpace, Trial
from slapo_tune.samplers.descent import ascend
from slapo_tune.samplers.edge import Edge
from slapo_tune.samplers.moves import drawn
from slapo_tune.samplers.replaying import Asking, replayed

__all__ = ["Frontier"]

STARTS = 3
COARSE = (3, 1)


class Frontier(Sampler):
    """Walk along the edge of what fits into memory, then look around its best point.

    It takes for granted that memory buys speed: of points that differ in one symbol alone, say the checkpoint ratio,
    the fastest is the one that needs the most memory and fits. So it tries points of that edge first, from a few
    starts along it and by smaller and smaller steps. Where memory buys nothing, or nothing is predicted, the
    second part still holds: from the best point found every symbol is moved alone, as ``coordinate`` does.
    """

    name = "frontier"

    def suggest(self, space: SearchSpace, history: Sequence[Trial], seed: int) -> Point | None:
        return replayed(_search, space, history, seed)


def _search(ask: Asking) -> None:
    edge = Edge(ask)
    starts: list[tuple[float, Point]] = []
    for number in range(STARTS):
        point = drawn(ask, number)
        if point is not None:
            point = edge.lifted(point)
            starts.append((ask.value(point), point))
    starts.sort(key=lambda start: -start[0])
    for _, point in starts[:1]:
        ascend(ask, point, COARSE, lift=edge.lifted)
    if ask.best is not None:
        ascend(ask, ask.best[0], (2, 1))
