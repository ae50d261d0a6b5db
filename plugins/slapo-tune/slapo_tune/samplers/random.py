"""The random sampler."""

from __future__ import annotations

from collections.abc import Sequence

from slapo_tune.samplers import Point, Sampler, SearchSpace, Trial
from slapo_tune.samplers.program import ReplayedSearch, sample_point


class Random(Sampler):
    """Try fitting points at random, with equally likely candidates of each symbol, until all are tried."""

    name = "random"

    def suggest(self, space: SearchSpace, history: Sequence[Trial], seed: int) -> Point | None:
        ask = ReplayedSearch(space, history, seed)
        for trial in ask.others():
            ask.value(trial.point)
        ask.random.seed(f"random {seed} {len(history)}")
        return sample_point(ask)
