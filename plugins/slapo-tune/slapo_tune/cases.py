"""The kit of samplers: checks of ``slapo plugins check`` on small spaces."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from slapo_core.plugins import Entry, Registry
from slapo_testing import CheckError, NotApplicable
from slapo_testing.kit import Kit
from slapo_tune.samplers import Point, Sampler, Trial


class SamplerKit(Kit):
    """Samplers propose points, no point twice, and keep no state."""

    name = "samplers"

    def checks(self, loaded: Any, entry: Entry, registry: Registry) -> Iterator[tuple[str, Callable[[], None]]]:
        yield from sampler_checks(loaded)


@dataclass(frozen=True)
class ListedSpace:
    """A space defined by a list of points, for tests of samplers.

    Args:
        listed: the points, sorted by their first values.
        needs: point -> bytes; None predicts nothing.
        memory: the limit in bytes.
    """

    listed: Sequence[Point]
    needs: Callable[[Point], int | None] | None = None
    memory: int | None = None

    def points(self) -> Iterator[Point]:
        """Return the points."""
        return (dict(point) for point in self.listed)

    def draw(self, pick: Callable[[str, tuple[Any, ...]], int]) -> Point | None:
        """Return the point that ``pick`` chooses, symbol by symbol."""
        left, depth = [list(point.items()) for point in self.listed], 0
        while len(left[0]) > depth:
            values = tuple(dict.fromkeys(items[depth][1] for items in left))
            chosen = (left[0][depth][0], values[pick(left[0][depth][0], values)])
            left = [items for items in left if items[depth] == chosen]
            depth += 1
        return dict(left[0])

    def predicted_memory(self, point: Point) -> int | None:
        """Return ``needs`` of the point."""
        return None if self.needs is None else self.needs(point)


def _spaces() -> dict[str, ListedSpace]:
    plane = [{"batch": batch, "checkpoint": ratio} for batch in (8, 16, 24, 32) for ratio in range(batch // 8)]
    kernels: list[Point] = [{"kernel": "eager"}, {"kernel": "flash", "block": (64, 1)}]
    kernels += [{"kernel": "flash", "block": (128, 1)}]

    def needs(point: Point) -> int:
        return int(point["batch"] * (8 - point["checkpoint"]))

    return {
        "a plane, memory predicted": ListedSpace(plane, needs, 180),
        "a plane, nothing predicted": ListedSpace(plane),
        "dependent choices": ListedSpace(kernels),
        "one point without symbols": ListedSpace([{}]),
    }


def sampler_checks(cls: type[Sampler]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the checks of a sampler by name.

    Args:
        cls: the sampler's class.
    """
    yield "proposes_points_of_the_space_once", partial(_on_all, cls, _proposes_points)
    yield "same_arguments_same_proposal", partial(_on_all, cls, _is_pure)


def _on_all(cls: type[Sampler], check: Callable[[type[Sampler], str, ListedSpace, int], None]) -> None:
    try:
        for where, space in _spaces().items():
            for seed in (0, 1):
                check(cls, where, space, seed)
    except ImportError as missing:
        raise NotApplicable(str(missing)) from missing


def _proposes_points(cls: type[Sampler], where: str, space: ListedSpace, seed: int) -> None:
    for history, point in _searched(cls, space, seed):
        if point is None:
            return
        tried = [trial.point for trial in history]
        if point not in space.listed or point in tried:
            what = "a point of the history" if point in tried else "a value that is not a point of the space"
            raise CheckError(
                f"{cls.name!r} proposes {what} ({where})",
                required="a point of the space without a trial, or None",
                got=f"{point!r} after {len(history)} trials",
                hint="skip points of the history of any status; return None when no point is left",
            )


def _is_pure(cls: type[Sampler], where: str, space: ListedSpace, seed: int) -> None:
    kept = cls()
    for history, point in _searched(cls, space, seed):
        given = copy.deepcopy(history)
        random.seed(len(history))
        again = [kept.suggest(space, given, seed), cls().suggest(space, copy.deepcopy(history), seed)]
        if given != history or any(other != point for other in again):
            raise CheckError(
                f"{cls.name!r} is not a function of its arguments ({where})",
                required="equal proposals for equal space, history and seed, from any instance",
                got=f"{point!r}, then {again[0]!r} and {again[1]!r}" if given == history else "the history was changed",
                hint="keep no state on the instance; use random.Random(f'{seed} {len(history)}')",
            )


def _searched(cls: type[Sampler], space: ListedSpace, seed: int) -> Iterator[tuple[list[Trial], Point | None]]:
    """Run a search to its end; yield the history before each proposal, and the proposal."""
    history: list[Trial] = []
    point: Point | None = {}
    while point is not None and len(history) <= len(space.listed):  # ends also with a sampler that repeats points
        state = random.getstate()
        try:
            point = cls().suggest(space, copy.deepcopy(history), seed)
            yield list(history), point
        finally:
            random.setstate(state)
        if point is not None and point not in space.listed:
            return
        if point is not None:
            history.append(_trial(space, len(history), point))


def _trial(space: ListedSpace, number: int, point: Point) -> Trial:
    """Return the trial of a point: most succeed, some do not fit, some fail."""
    needs = space.predicted_memory(point)
    predicted = {} if needs is None else {"memory": needs}
    if needs is not None and space.memory is not None and needs > space.memory:
        return Trial(number, point, "over_memory", reason="does not fit", predicted=predicted)
    status = ("ok", "ok", "oom", "ok", "crash", "ok", "refused", "timeout", "ok", "wrong")[number % 10]
    value = 1.0 + number % 3 if status == "ok" else None
    return Trial(number, point, status, value, "" if value else "failed", predicted)
