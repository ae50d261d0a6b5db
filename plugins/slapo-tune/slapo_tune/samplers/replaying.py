"""A search written as a program that asks for values, run again from its start for each proposal.

What the history has is answered; the first point that it does not have is the proposal. So the program needs no state
that a killed search could lose, and it decides with what it had asked for at that place, not with what came later.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from slapo_core.spec.sampler import Point, SearchSpace, Trial

__all__ = ["FAILED", "Asking", "key", "margin", "replayed"]

FAILED = -math.inf
"""The value of a point that gave none: it ran out of memory, crashed, was refused, ..."""

_ALLOWANCE = 1 << 20
"""Bytes that are not held against an estimate: small tensors that ranks compare when they start."""

Key = frozenset[tuple[str, object]]


def key(point: Point) -> Key:
    """What tells points apart."""
    return frozenset(point.items())


def margin(history: Sequence[Trial], memory: int | None) -> float:
    """Return the factor for predictions of memory that trials so far have shown; at least 1.

    It is the largest ratio of measured to predicted memory. A trial that ran out of memory shows that its prediction is
    too much, unless another one with a larger prediction fitted.

    Args:
        history: finished trials.
        memory: the limit in bytes.
    """
    known = [(trial, float(trial.predicted["memory"])) for trial in history if trial.predicted.get("memory")]
    fitted = [(trial.measured.get("memory", 0.0), predicted) for trial, predicted in known if trial.status == "ok"]
    largest = max((predicted for _, predicted in fitted), default=0.0)
    ratios = [(measured - _ALLOWANCE) / predicted for measured, predicted in fitted]
    if memory is not None:
        failed = [predicted for trial, predicted in known if trial.status == "oom" and predicted > largest]
        ratios += [memory / predicted + 1e-9 for predicted in failed]
    return max([1.0, *ratios])


class _Unknown(Exception):  # noqa: N818 - carries the proposal out of the program
    def __init__(self, point: Point) -> None:
        self.point = point


class Asking:
    """What a program is given.

    Args:
        space: of the search.
        history: all trials so far.
        seed: of the search.

    Attributes:
        space: of the search.
        seed: of the search.
        random: the program's only source of chance.
        best: the best point that was asked for, with its value; None before one gave a value.
        asked: the values that were asked for.
    """

    def __init__(self, space: SearchSpace, history: Sequence[Trial], seed: int) -> None:
        self.space = space
        self.seed = seed
        self.random = random.Random(f"slapo {seed}")
        self.best: tuple[Point, float] | None = None
        self.asked: dict[Key, float] = {}
        self._history = {key(trial.point): trial for trial in history}
        self._learned: list[Trial] = []  # those of points that were asked for
        self._margin = 1.0

    def value(self, point: Point) -> float:
        """What a trial of the point gave; `FAILED` if it gave nothing. Ends the program if there is no trial yet."""
        trial = self._history.get(key(point))
        if trial is None:
            raise _Unknown(point)
        value = FAILED if trial.value is None or not math.isfinite(trial.value) else float(trial.value)
        if key(point) not in self.asked:
            self.asked[key(point)] = value
            self._learn(trial)
            if value > (FAILED if self.best is None else self.best[1]):
                self.best = (trial.point, value)
        return value

    def points(self) -> list[tuple[Point, float]]:
        """What was asked for, in that order, with its value."""
        return [(self._history[each].point, value) for each, value in self.asked.items()]

    def others(self) -> list[Trial]:
        """Trials that were not asked for, oldest first."""
        return [trial for each, trial in self._history.items() if each not in self.asked]

    def is_known(self, point: Point) -> bool:
        """Whether the program has asked for the value of the point."""
        return key(point) in self.asked

    def fits(self, point: Point) -> bool:
        """Whether the point is worth a trial, as far as memory goes: by the estimate, times what trials have shown."""
        if key(point) in self.asked:
            return self.asked[key(point)] > FAILED
        limit, predicted = self.space.memory, self.space.predicted_memory(point)
        if limit is None or predicted is None:
            return True
        return predicted * self._margin <= limit

    def _learn(self, trial: Trial) -> None:
        self._learned.append(trial)
        self._margin = margin(self._learned, self.space.memory)


def replayed(
    program: Callable[[Asking], None], space: SearchSpace, history: Sequence[Trial], seed: int
) -> Point | None:
    """The first point that the program asks for and the history does not have; None if it ends without one."""
    try:
        program(Asking(space, history, seed))
    except _Unknown as unknown:
        return dict(unknown.point)
    return None
