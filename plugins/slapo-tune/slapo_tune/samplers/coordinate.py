"""Randomised coordinate descent, the paper's, with several starts."""

from __future__ import annotations

from collections.abc import Sequence

from slapo_core import Sampler
from slapo_core.spec.sampler import Point, SearchSpace, Trial
from slapo_tune.samplers.descent import ascend, started
from slapo_tune.samplers.moves import FEW
from slapo_tune.samplers.replaying import Asking, replayed

__all__ = ["Coordinate"]

STARTS = 4
"""Points that are tried first."""

TAKEN = 2
"""Of these, the best ones: a descent starts at each."""

LAST = (2, 1)
"""By how many candidates the symbols of the best point are moved at last."""


class Coordinate(Sampler):
    """Randomised coordinate descent (Nesterov, 2012), as in the paper (section 3.4), with several starts.

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
