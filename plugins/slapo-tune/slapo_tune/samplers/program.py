"""What samplers are made of: a search that is replayed from its history, and moves in a space."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from slapo_tune.samplers import Point, SearchSpace, Trial

FAILED = -math.inf
"""The value of a point that gave none: it ran out of memory, crashed, was refused, ..."""

_ALLOWANCE = 1 << 20
"""Bytes that are not held against an estimate: small tensors that ranks compare when they start."""

Key = frozenset[tuple[str, object]]


def key(point: Point) -> Key:
    """Return what tells points apart."""
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
    """The search as a sampler's program sees it.

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
        """Return the value of a point's trial; `FAILED` if it has none. Ends the program if there is no trial yet."""
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
        """Return the points asked for, in order, with their values."""
        return [(self._history[each].point, value) for each, value in self.asked.items()]

    def others(self) -> list[Trial]:
        """Return trials that were not asked for, oldest first."""
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
    """Return the first point that the program asks for and the history does not have; None if it ends without one."""
    try:
        program(Asking(space, history, seed))
    except _Unknown as unknown:
        return dict(unknown.point)
    return None


FEW = 4
"""Candidates of a symbol that may well have no order, e.g. the names of kernels."""

FARTHEST = 4
"""Of how many changes away from a move a point is still taken for that move."""

FAR = 24
"""The same, of changes of one symbol."""

DRAWS = 40
"""Starts that are drawn before a space is walked for one that fits."""


def candidates_of(space: SearchSpace, point: Point) -> dict[str, tuple[Any, ...]]:
    """Return what each symbol of a point was chosen from; nothing where the space does not have the point."""
    found: dict[str, tuple[Any, ...]] = {}
    is_there = True

    def pick(name: str, candidates: tuple[Any, ...]) -> int:
        nonlocal is_there
        found[name] = candidates
        is_there = is_there and name in point and point[name] in candidates
        return candidates.index(point[name]) if is_there else 0

    return found if space.draw(pick) == dict(point) and is_there else {}


def exactly(space: SearchSpace, wanted: Mapping[str, Any]) -> Point | None:
    """Return the point with these values; None if the space has none."""
    return dict(wanted) if candidates_of(space, wanted) else None


def drawn(ask: Asking, number: int | None = None) -> Point | None:
    """Sample an allowed point that was not asked for; None if there is none.

    Args:
        ask: of the search.
        number: of the start: starts in a row differ in every symbol with few candidates, so that some of them see all
            of these; None for a point without regard to others.
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


def neighbors(ask: Asking, point: Point) -> Iterator[Point]:
    """Yield the nearest points that fit with one symbol moved to the candidate before or after."""
    for symbol in point:
        for step in (1, -1):
            other = moved(ask, point, symbol, step)
            if other is not None:
                yield other


def moved(ask: Asking, point: Point, symbol: str, step: int) -> Point | None:
    """Return the nearest point that fits with ``symbol`` moved along its candidates.

    The other symbols keep their values where they can; where their candidates changed, or the point is refused or does
    not fit, as few of them as possible take a near candidate instead. So a move along the edge of a polygon, or of
    what fits into memory, follows the edge.

    Args:
        ask: of the search.
        point: where from.
        symbol: which is moved.
        step: by how many candidates; further than the last one is the last one.

    Returns:
        None where there is nothing to move to.
    """
    values = candidates_of(ask.space, point)[symbol]
    index = values.index(point[symbol])
    target = min(max(index + step, 0), len(values) - 1)
    if target == index:
        return None
    wanted = {**point, symbol: values[target]}
    return next(nearest(ask, wanted, symbol), None)


def nearest(ask: Asking, wanted: Mapping[str, Any], fixed: str) -> Iterator[Point]:
    """Yield allowed points by their distance from the wanted one; ``fixed`` has the wanted value.

    Args:
        ask: of the search.
        wanted: values that need not be a point.
        fixed: the symbol that is not changed.
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
    """Yield all ways to write ``total`` as a sum of numbers, in a fixed order; or those with one nonzero part."""
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
    """Return the point whose symbols take the candidates of the given distances from the wanted ones."""
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
