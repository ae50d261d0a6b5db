"""The exhaustive sampler."""

from __future__ import annotations

from collections.abc import Sequence

from slapo_tune.samplers import Point, Sampler, SearchSpace, Trial
from slapo_tune.samplers.program import key


class Exhaustive(Sampler):
    """Try all points of the space, in the order of the candidates."""

    name = "exhaustive"

    def suggest(self, space: SearchSpace, history: Sequence[Trial], seed: int) -> Point | None:
        tried = {key(trial.point) for trial in history}
        return next((point for point in space.points() if key(point) not in tried), None)
