"""Along the edge of what fits into memory, then where the trials so far promise most."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from slapo_core import Sampler
from slapo_core.spec.sampler import Point, SearchSpace, Trial
from slapo_tune.samplers.descent import ascend, started
from slapo_tune.samplers.edge import lifted
from slapo_tune.samplers.model import Model, places
from slapo_tune.samplers.moves import neighbours
from slapo_tune.samplers.replaying import FAILED, Asking, key, replayed

__all__ = ["Frontier"]

STARTS = 3
"""Points of the edge that are tried first."""

COARSE = (3, 1)
"""By how many candidates a symbol is moved along the edge, one after the other."""

PATIENCE = 6
"""Trials in a row that may be no better than the best one before the search ends."""

POOL = 2000
"""Points that the model is asked about; of a larger space these are drawn, and the best one's neighbours."""


class Frontier(Sampler):
    """Walk along the edge of what fits into memory, then look where the trials so far promise most.

    The walk takes for granted that memory buys speed: of points that differ in one symbol alone, say the checkpoint
    ratio, the fastest is the one that needs the most memory and fits. So it tries points on that edge, from the best of
    three starts by smaller and smaller steps. What follows takes nothing for granted: a model of all trials so far says
    which point of the whole space promises most, until six in a row were no better than the best. So the search also
    finds a best point that is not on the edge, or where nothing is predicted; it needs more trials for it.

    Points that the estimate says do not fit are not proposed; a trial that runs out of memory, or needs more than was
    predicted, makes the search that much more careful.
    """

    name = "frontier"

    def suggest(self, space: SearchSpace, history: Sequence[Trial], seed: int) -> Point | None:
        return replayed(_search, space, history, seed)


def _search(ask: Asking) -> None:
    starts = started(ask, STARTS, lifted)
    if not starts:
        return
    ascend(ask, starts[0], COARSE, lift=lifted)
    if _without_gain(ask) < PATIENCE and ask.best is not None:
        point = _promising(ask, [*_pool(ask), *neighbours(ask, ask.best[0])])
        if point is not None:
            ask.value(point)


def _without_gain(ask: Asking) -> int:
    """Of the trials after the walk, how many were started since the last one that was better than all before."""
    without = 0
    for trial in ask.others():
        before = FAILED if ask.best is None else ask.best[1]
        if ask.value(trial.point) > before:
            without = 0
        elif trial.status not in ("over_memory", "refused"):
            without += 1
    return without


def _pool(ask: Asking) -> list[Point]:
    pool = list(itertools.islice(ask.space.points(), POOL + 1))
    if len(pool) <= POOL:
        return pool
    chance = random.Random(f"pool {ask.seed}")
    drawn = (ask.space.draw(lambda name, candidates: chance.randrange(len(candidates))) for _ in range(POOL))
    return list({key(point): point for point in drawn if point is not None}.values())


def _promising(ask: Asking, pool: Sequence[Point]) -> Point | None:
    """The point that fits, was not tried, and promises most; None if there is none."""
    tried = [(point, value) for point, value in ask.points() if value > FAILED]
    points = [point for point, _ in tried]
    model = Model(places([*pool, *points]), points, [value for _, value in tried])
    left = [point for point in pool if not ask.is_known(point)]
    ranked = sorted(left, key=model.promise, reverse=True)
    return next((point for point in ranked if ask.fits(point)), None)
