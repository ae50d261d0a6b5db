"""The paper's randomised coordinate descent, with several starts."""

from __future__ import annotations

from collections.abc import Sequence

from slapo_core import Sampler
from slapo_core.spec.sampler import Point, SearchSpace, Trial
from slapo_tune.samplers.descent import ascend
from slapo_tune.samplers.moves import drawn
from slapo_tune.samplers.replaying import Asking, replayed

__all__ = ["Coordinate"]

STARTS = 4
TAKEN = 2
POLISH = (2, 1)


class Coordinate(Sampler):
    """Randomised coordinate descent."""

    name = "coordinate"

    def suggest(self, space: SearchSpace, history: Sequence[Trial], seed: int) -> Point | None:
        return replayed(_search, space, history, seed)


def _search(ask: Asking) -> None:
    starts: list[tuple[float, Point]] = []
    while len(starts) < STARTS and (point := drawn(ask, len(starts))) is not None:
        starts.append((ask.value(point), point))
    starts.sort(key=lambda start: -start[0])  # the sort keeps the order of equals
    for _, point in starts[:TAKEN]:
        ascend(ask, point)
    if ask.best is not None:
        ascend(ask, ask.best[0], POLISH, few=4)
