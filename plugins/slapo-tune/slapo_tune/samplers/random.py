"""Points at random."""

from __future__ import annotations

from collections.abc import Sequence

from slapo_core import Sampler
from slapo_core.spec.sampler import Point, SearchSpace, Trial
from slapo_tune.samplers.moves import drawn
from slapo_tune.samplers.replaying import Asking, replayed

__all__ = ["Random"]


class Random(Sampler):
    """Points that fit, at random: each symbol's candidates are equally likely; ends when all were tried."""

    name = "random"

    def suggest(self, space: SearchSpace, history: Sequence[Trial], seed: int) -> Point | None:
        return replayed(_search, space, history, seed)


def _search(ask: Asking) -> None:
    while (point := drawn(ask)) is not None:
        ask.value(point)
