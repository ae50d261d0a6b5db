"""Tools of samplers: a search replayed from its history, and moves in a space."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from slapo_tune.samplers import Point, SearchSpace, Trial

FAILED = -math.inf
"""The value of a failed trial: out of memory, crashed, refused, ..."""

_ALLOWANCE = 1 << 20
"""Bytes that an estimate may miss: small tensors that ranks compare at the start."""

Key = frozenset[tuple[str, object]]


def key(point: Point) -> Key:
    """Return a hashable key of a point."""
    return frozenset(point.items())


def margin(history: Sequence[Trial], memory: int | None) -> float:
    """Return the factor by which trials so far exceed predictions of memory; at least 1.

    It is the largest ratio of measured to predicted memory. A trial that ran out of memory needs more than the limit,
    unless a trial with a larger prediction fitted.

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


class _ProposedPoint(Exception):  # noqa: N818 - ends the program at its proposal
    def __init__(self, point: Point) -> None:
        self.point = point


class ReplayedSearch:
    """A search that a sampler's program replays from its history.

    Args:
        space: the search space.
        history: all trials so far.
        seed: seed of the search.

    Attributes:
        space: the search space.
        seed: seed of the search.
        random: the program's only source of random numbers.
        best: the best queried point with its value; None before the first value.
        asked: the queried values by point.
    """

    def __init__(self, space: SearchSpace, history: Sequence[Trial], seed: int) -> None:
        self.space = space
        self.seed = seed
        self.random = random.Random(f"slapo {seed}")
        self.best: tuple[Point, float] | None = None
        self.asked: dict[Key, float] = {}
        self._history = {key(trial.point): trial for trial in history}
        self._learned: list[Trial] = []  # trials of queried points
        self._margin = 1.0

    def value(self, point: Point) -> float:
        """Return the value of a point's trial, or `FAILED`; end the program without a trial."""
        trial = self._history.get(key(point))
        if trial is None:
            raise _ProposedPoint(point)
        value = FAILED if trial.value is None or not math.isfinite(trial.value) else float(trial.value)
        if key(point) not in self.asked:
            self.asked[key(point)] = value
            self._learn(trial)
            if value > (FAILED if self.best is None else self.best[1]):
                self.best = (trial.point, value)
        return value

    def points(self) -> list[tuple[Point, float]]:
        """Return the queried points in order, with their values."""
        return [(self._history[each].point, value) for each, value in self.asked.items()]

    def others(self) -> list[Trial]:
        """Return the trials that were not queried, oldest first."""
        return [trial for each, trial in self._history.items() if each not in self.asked]

    def is_known(self, point: Point) -> bool:
        """Return whether the program has queried the point."""
        return key(point) in self.asked

    def fits(self, point: Point) -> bool:
        """Return whether the point fits into memory: by its trial, or by the corrected estimate."""
        if key(point) in self.asked:
            return self.asked[key(point)] > FAILED
        limit, predicted = self.space.memory, self.space.predicted_memory(point)
        if limit is None or predicted is None:
            return True
        return predicted * self._margin <= limit

    def _learn(self, trial: Trial) -> None:
        self._learned.append(trial)
        self._margin = margin(self._learned, self.space.memory)


def replay_program(
    program: Callable[[ReplayedSearch], None], space: SearchSpace, history: Sequence[Trial], seed: int
) -> Point | None:
    """Return the first point without a trial that the program queries; None if it ends before."""
    try:
        program(ReplayedSearch(space, history, seed))
    except _ProposedPoint as proposed:
        return dict(proposed.point)
    return None


FEW = 4
"""Maximum number of candidates that are assumed to be unordered, e.g. names of kernels."""

FARTHEST = 4
"""Maximum number of changes of other symbols for a move."""

FAR = 24
"""Maximum number of changes of one other symbol for a move."""

DRAWS = 40
"""Random draws before a search through all points."""


def candidates_of(space: SearchSpace, point: Point) -> dict[str, tuple[Any, ...]]:
    """Return the candidates of each symbol of a point; empty if the space lacks the point."""
    found: dict[str, tuple[Any, ...]] = {}
    is_there = True

    def pick(name: str, candidates: tuple[Any, ...]) -> int:
        nonlocal is_there
        found[name] = candidates
        is_there = is_there and name in point and point[name] in candidates
        return candidates.index(point[name]) if is_there else 0

    return found if space.draw(pick) == dict(point) and is_there else {}


def point_with(space: SearchSpace, wanted: Mapping[str, Any]) -> Point | None:
    """Return the point with these values; None if the space lacks it."""
    return dict(wanted) if candidates_of(space, wanted) else None


def sample_point(ask: ReplayedSearch, number: int | None = None) -> Point | None:
    """Sample a fitting point that was not queried; None if there is none.

    Args:
        ask: the search.
        number: number of the start: consecutive starts differ in each symbol with few candidates; None samples
            independently.
    """
    for attempt in range(DRAWS):
        spread = number if attempt < DRAWS // 2 else None

        def pick(name: str, candidates: tuple[Any, ...], spread: int | None = spread) -> int:
            if spread is None or len(candidates) > FEW:
                return ask.random.randrange(len(candidates))
            return (spread + random.Random(f"{ask.seed} {name}").randrange(len(candidates))) % len(candidates)

        point = ask.space.draw(pick)
        if point is not None and not ask.is_known(point) and ask.fits(point):
            return point
    return next((point for point in ask.space.points() if not ask.is_known(point) and ask.fits(point)), None)


def neighbors(ask: ReplayedSearch, point: Point) -> Iterator[Point]:
    """Yield the nearest fitting points with one symbol moved by one candidate."""
    for symbol in point:
        for step in (1, -1):
            other = move(ask, point, symbol, step)
            if other is not None:
                yield other


def move(ask: ReplayedSearch, point: Point, symbol: str, step: int) -> Point | None:
    """Return the nearest fitting point with ``symbol`` moved along its candidates.

    The other symbols keep their values if possible; if their candidates change, or the point is refused or does not
    fit, as few of them as possible take a near candidate. So a move along an edge of the space or of memory follows the
    edge.

    Args:
        ask: the search.
        point: the first point.
        symbol: the moved symbol.
        step: number of candidates, up to the last one.

    Returns:
        the point; None at the last candidate, or without a fitting point.
    """
    values = candidates_of(ask.space, point)[symbol]
    index = values.index(point[symbol])
    target = min(max(index + step, 0), len(values) - 1)
    if target == index:
        return None
    wanted = {**point, symbol: values[target]}
    return next(nearest(ask, wanted, symbol), None)


def nearest(ask: ReplayedSearch, wanted: Mapping[str, Any], fixed: str) -> Iterator[Point]:
    """Yield fitting points by their distance from wanted values.

    Args:
        ask: the search.
        wanted: values, which need not be a point.
        fixed: the symbol that keeps its wanted value.
    """
    others = [name for name in wanted if name != fixed]
    seen = []
    for changes in range(FAR + 1):
        for split in _splits(changes, len(others), together=changes <= FARTHEST):
            ranks = dict(zip(others, split, strict=True))
            point = _ranked(ask.space, wanted, ranks, fixed)
            if point is not None and point not in seen:
                seen.append(point)
                if ask.fits(point):
                    yield point


def _splits(total: int, parts: int, *, together: bool) -> Iterator[tuple[int, ...]]:
    """Yield the compositions of ``total`` in a fixed order; or only those with one nonzero part."""
    if not together:
        yield from (tuple(total * (place == part) for place in range(parts)) for part in reversed(range(parts)))
        return
    if parts == 0:
        yield from [()] if total == 0 else []
        return
    for bars in itertools.combinations(range(total + parts - 1), parts - 1):
        edges = (-1, *bars, total + parts - 1)
        yield tuple(after - before - 1 for before, after in itertools.pairwise(edges))


def _ranked(space: SearchSpace, wanted: Mapping[str, Any], ranks: Mapping[str, int], fixed: str) -> Point | None:
    """Return the point whose symbols have candidates of given ranks by distance from the wanted values."""
    is_there = True

    def pick(name: str, candidates: tuple[Any, ...]) -> int:
        nonlocal is_there
        if name not in wanted:
            return 0
        rank = ranks.get(name, 0)
        if name == fixed and wanted[name] not in candidates:
            is_there = False
        if rank >= len(candidates):
            is_there = False
            return 0
        return sorted(range(len(candidates)), key=lambda index: _distance(candidates, index, wanted[name]))[rank]

    point = space.draw(pick)
    return point if is_there and point is not None and point.get(fixed) == wanted[fixed] else None


def _distance(candidates: tuple[Any, ...], index: int, value: Any) -> tuple[float, int]:
    if value in candidates:
        return abs(index - candidates.index(value)), index
    numbers = all(type(item) in (int, float) for item in (*candidates, value))
    return (abs(candidates[index] - value) if numbers else index), index
