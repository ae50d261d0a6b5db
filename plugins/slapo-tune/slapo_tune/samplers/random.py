"""Points at random."""

from __future__ import annotations

from collections.abc import Sequence

from slapo_tune.samplers import Point, Sampler, SearchSpace, Trial
from slapo_tune.samplers.program import Asking, drawn


class Random(Sampler):
    """Points that fit, at random: each symbol's candidates are equally likely; ends when all were tried."""

    name = "random"

    def suggest(self, space: SearchSpace, history: Sequence[Trial], seed: int) -> Point | None:
        ask = Asking(space, history, seed)
        for trial in ask.others():
            ask.value(trial.point)
        ask.random.seed(f"random {seed} {len(history)}")
        return drawn(ask)
