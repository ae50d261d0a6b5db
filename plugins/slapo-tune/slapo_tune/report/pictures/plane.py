"""Two symbols of a space as the axes of a picture, and what stands at each place of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slapo_core import ArgumentError
from slapo_core.spec.sampler import Point, Trial
from slapo_tune.report.symbols import candidates, symbols
from slapo_tune.report.words import choice, same_point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Place", "Plane"]

_ORDER = ("ok", "wrong", "crash", "timeout", "oom", "over_memory", "refused")
_LABELLED = 16  # candidates on an axis: of more, every other one is labelled
_MISSING = "missing"


@dataclass
class Place:
    """All points that have the same two choices.

    Args:
        points: of the space; none where the space refuses all.
        trials: of them.
    """

    points: list[Point] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)

    @property
    def status(self) -> str:
        """``"ok"`` if any trial was; else the first of the others; ``""`` where nothing was tried."""
        found = [trial.status for trial in self.trials]
        return next((status for status in _ORDER if status in found), "")

    @property
    def value(self) -> float | None:
        """The largest."""
        values = [trial.value for trial in self.trials if trial.status == "ok" and trial.value is not None]
        return max(values, default=None)


class Plane:
    """The places that two symbols span.

    Args:
        points: of the space.
        trials: of the search.
        axes: the two symbols; None takes the two with the most candidates.

    Attributes:
        symbols: of the horizontal and the vertical axis.
        others: the symbols that have several candidates and are not on an axis.

    Raises:
        ArgumentError: there is no such symbol, or fewer than two that have several candidates.
    """

    def __init__(self, points: Sequence[Point], trials: Sequence[Trial], axes: tuple[str, str] | None = None) -> None:
        known = [*points, *(trial.point for trial in trials)]
        values = {name: candidates(known, name) for name in symbols(known)}
        free = [name for name in values if len(values[name]) > 1]
        if axes is None:
            widest = sorted(free, key=lambda name: -len(values[name]))[:2]
            axes = tuple(name for name in free if name in widest)  # type: ignore[assignment]
        if axes is None or len(axes) != 2 or axes[0] == axes[1] or not set(axes) <= set(values):
            raise ArgumentError(
                f"a picture of the space needs two symbols (got {', '.join(axes or ()) or 'none'}; the space has "
                f"{', '.join(values) or 'none'})",
                hint=f"--axes {','.join(free[:2])}" if len(free) > 1 else None,
            )
        self.symbols = axes
        self.others = tuple(name for name in free if name not in axes)
        self._spots = tuple(_spots_of(name, known) for name in axes)
        self.places: dict[tuple[float, float], Place] = {}
        for point in points:
            self._place(point).points.append(point)
        for trial in trials:
            self._place(trial.point).trials.append(trial)

    def at(self, point: Point) -> tuple[float, float]:
        """Where a point stands: by its numbers if they are evenly spaced, else one after the other."""
        return tuple(  # type: ignore[return-value]
            spots[_key(point[name]) if name in point else _MISSING][1]
            for name, spots in zip(self.symbols, self._spots, strict=True)
        )

    def spread(self) -> tuple[float, float]:
        """The number of steps along each axis."""
        return (float(len(self._spots[0])), float(len(self._spots[1])))

    def edge(self) -> list[tuple[float, float]]:
        """The outline of what the space allows, along its lowest places and back along its highest ones."""
        columns: dict[float, list[float]] = {}
        for (x, y), place in self.places.items():
            if place.points:
                columns.setdefault(x, []).append(y)
        ordered = sorted(columns)
        return [(x, min(columns[x])) for x in ordered] + [(x, max(columns[x])) for x in reversed(ordered)]

    def label(self, axes: Axes) -> None:
        """Candidates on the axes, and their names."""
        for which, (name, spots) in enumerate(zip(self.symbols, self._spots, strict=True)):
            every = 1 + len(spots) // (_LABELLED + 1)
            ticks = [(spot, text) for text, spot in spots.values()][::every]
            axis = axes.xaxis if which == 0 else axes.yaxis
            axis.set_ticks([spot for spot, _ in ticks], [text for _, text in ticks])
            (axes.set_xlabel if which == 0 else axes.set_ylabel)(name)
            where = [spot for _, spot in spots.values()]
            margin = 0.7 * (max(where) - min(where)) / max(1, len(where) - 1) or 1.0
            (axes.set_xlim if which == 0 else axes.set_ylim)(min(where) - margin, max(where) + margin)

    def _place(self, point: Point) -> Place:
        return self.places.setdefault(self.at(point), Place())


def _spots_of(name: str, points: Sequence[Point]) -> dict[str, tuple[str, float]]:
    """Each candidate's label and place on an axis; a point without the symbol stands before all that have it."""
    values = candidates(points, name)
    numeric = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    steps = {round(after - before, 9) for before, after in itertools.pairwise(values)} if numeric else set()
    even = len(steps) == 1
    spots = {_key(value): (choice(value), float(value if even else index)) for index, value in enumerate(values)}
    if all(name in point for point in points):
        return spots
    return {_MISSING: ("none", spots[_key(values[0])][1] - (steps.pop() if even else 1.0)), **spots}


def _key(value: Any) -> str:
    return same_point({"": value})
