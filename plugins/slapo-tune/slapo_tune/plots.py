"""Plot a search; requires matplotlib, which the extra ``draw`` installs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slapo_core import ArgumentError
from slapo_tune.report import (
    STARTED,
    SearchStep,
    agreement,
    best_trial,
    candidates,
    choice,
    number,
    pairs,
    same_point,
    search_steps,
    symbols,
)
from slapo_tune.samplers import Point, Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKS = {
    "oom": ("X", "#c03a2b", "out of memory when run"),
    "over_memory": ("^", "#e08a1e", "predicted not to fit, not run"),
    "refused": ("s", "#8a8a8a", "refused by a step, not run"),
    "timeout": ("P", "#7b4ea3", "timeout"),
    "crash": ("D", "#000000", "crash"),
    "wrong": ("v", "#c2277d", "wrong result"),
    "": ("o", "#d8dce2", "not tried"),
}
"""Marker, color and label of cells without a value; cells with a value are colored by it."""

_BLUE, _RED, _GRAY = "#2f5d9b", "#c03a2b", "#8a8a8a"
_NUMBERED = 60  # trials whose numbers are drawn

_ORDER = ("ok", "wrong", "crash", "timeout", "oom", "over_memory", "refused")
_LABELED = 16  # candidates on an axis: of more, every other one is labeled
_MISSING = "missing"


@dataclass
class Cell:
    """The points with the same two choices.

    Args:
        points: points of the space; empty if all are refused.
        trials: their trials.
    """

    points: list[Point] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)

    @property
    def status(self) -> str:
        """``"ok"`` if any trial was, else the first status in ``_ORDER``; ``""`` without a trial."""
        found = [trial.status for trial in self.trials]
        return next((status for status in _ORDER if status in found), "")

    @property
    def value(self) -> float | None:
        """The largest value."""
        values = [trial.value for trial in self.trials if trial.status == "ok" and trial.value is not None]
        return max(values, default=None)


class Plane:
    """The cells of a plane of two symbols.

    Args:
        points: points of the space.
        trials: trials of the search.
        axes: the two symbols; None takes the two with the most candidates.

    Attributes:
        symbols: symbols of the horizontal and the vertical axis.
        others: further symbols with several candidates.

    Raises:
        ArgumentError: an unknown symbol, or fewer than two symbols with several candidates.
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
                f"a plot of the space needs two symbols of {', '.join(values) or 'none'} "
                f"(got {', '.join(axes or ()) or 'none'})",
                hint=f"--axes {','.join(free[:2])}" if len(free) > 1 else None,
            )
        self.symbols = axes
        self.others = tuple(name for name in free if name not in axes)
        self._spots = tuple(_spots_of(name, known) for name in axes)
        self.cells: dict[tuple[float, float], Cell] = {}
        for point in points:
            self._cell(point).points.append(point)
        for trial in trials:
            self._cell(trial.point).trials.append(trial)

    def at(self, point: Point) -> tuple[float, float]:
        """Return the coordinates of a point: numbers if candidates are evenly spaced, else positions."""
        return tuple(  # type: ignore[return-value]
            spots[_key(point[name]) if name in point else _MISSING][1]
            for name, spots in zip(self.symbols, self._spots, strict=True)
        )

    def edge(self) -> list[tuple[float, float]]:
        """Return the outline of the allowed region: the lower edge, then the upper edge backwards."""
        columns: dict[float, list[float]] = {}
        for (x, y), cell in self.cells.items():
            if cell.points:
                columns.setdefault(x, []).append(y)
        ordered = sorted(columns)
        return [(x, min(columns[x])) for x in ordered] + [(x, max(columns[x])) for x in reversed(ordered)]

    def label(self, axes: Axes) -> None:
        """Label the axes with symbols and candidates."""
        for which, (name, spots) in enumerate(zip(self.symbols, self._spots, strict=True)):
            every = 1 + len(spots) // (_LABELED + 1)
            ticks = [(spot, text) for text, spot in spots.values()][::every]
            axis = axes.xaxis if which == 0 else axes.yaxis
            axis.set_ticks([spot for spot, _ in ticks], [text for _, text in ticks])
            (axes.set_xlabel if which == 0 else axes.set_ylabel)(name)
            where = [spot for _, spot in spots.values()]
            margin = 0.7 * (max(where) - min(where)) / max(1, len(where) - 1) or 1.0
            (axes.set_xlim if which == 0 else axes.set_ylim)(min(where) - margin, max(where) + margin)

    def _cell(self, point: Point) -> Cell:
        return self.cells.setdefault(self.at(point), Cell())


def _spots_of(name: str, points: Sequence[Point]) -> dict[str, tuple[str, float]]:
    """Return label and coordinate of each candidate; points without the symbol come first."""
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


def write_picture(
    points: Sequence[Point],
    trials: Sequence[Trial],
    file: Path,
    *,
    axes: tuple[str, str] | None = None,
    unit: str = "samples/s",
    title: str = "",
) -> Path:
    """Plot the space with the trials, the best so far, and predictions against measurements.

    The space is left out if fewer than two symbols have several candidates, and predictions if there are none.

    Args:
        points: points of the space.
        trials: trials of the search.
        file: the file to write, e.g. ``search.png``; directories are created.
        axes: the symbols on the axes of the space; None takes the two with the most candidates.
        unit: unit of the value.
        title: title, e.g. the study's file.

    Raises:
        ArgumentError: matplotlib is not installed; unknown symbols; the file cannot be written.
    """
    panels: list[Callable[[Axes], None]] = []
    if axes is not None or sum(len(candidates(points, name)) > 1 for name in symbols(points)) > 1:
        panels.append(partial(_draw_space, Plane(points, trials, axes), trials, unit))
    steps = search_steps(trials)
    scale, name = _scale(steps[-1].seconds if steps else 0.0, ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds")))
    panels.append(partial(_draw_best, steps, [float(step.started) for step in steps], "trials started", unit))
    panels.append(
        partial(_draw_best, steps, [step.seconds / scale for step in steps], f"time in trials ({name})", unit)
    )
    panels += [partial(_draw_prediction, trials, what) for what in ("memory", "time") if pairs(trials, what)]
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ArgumentError(
            "plots require matplotlib, which is not installed", hint="pip install 'slapo-tune[draw]'"
        ) from error
    rows = (len(panels) + 1) // 2
    figure = Figure(figsize=(12.0, 4.6 * rows), layout="constrained")
    for index, draw in enumerate(panels, start=1):
        draw(figure.add_subplot(rows, 2, index))
    for panel in figure.axes:
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=130)
    except (OSError, ValueError) as error:  # ValueError for an unknown format
        raise ArgumentError(f"the plot cannot be written: {error}", hint="--plot search.png") from error
    return file


def _draw_space(plane: Plane, trials: Sequence[Trial], unit: str, axes: Axes) -> None:
    """Plot the cells, colored by the best value, with the order of trials as numbers."""
    edge = plane.edge()
    axes.fill(*zip(*edge, strict=True), facecolor="#f1f3f6", edgecolor="#b9c0ca", zorder=1)
    for status, (marker, color, words) in _MARKS.items():
        spots = [where for where, cell in plane.cells.items() if cell.status == status]
        _scatter(axes, spots, marker=marker, color=color, label=words)
    fine = {where: cell.value for where, cell in plane.cells.items() if cell.value is not None}
    if fine:
        values = list(fine.values())
        sample_point = axes.scatter(
            [x for x, _ in fine], [y for _, y in fine], c=values, s=90, cmap="viridis", zorder=3
        )
        axes.figure.colorbar(sample_point, ax=axes, label=unit, pad=0.02)
    best = best_trial(trials)
    if best is not None:
        style = {"s": 190, "facecolors": "none", "edgecolors": _RED, "linewidths": 2.2}
        _scatter(axes, [plane.at(best.point)], label=f"best: {number(best.value or 0.0)} {unit}", **style)
    started: dict[tuple[float, float], list[str]] = {}
    for order, trial in enumerate((trial for trial in trials if trial.status in STARTED), start=1):
        started.setdefault(plane.at(trial.point), []).append(str(order))
    for where, orders in started.items() if len(trials) <= _NUMBERED else ():
        text = ", ".join(orders) if len(orders) < 4 else f"{orders[0]} ... {orders[-1]}"
        axes.annotate(text, where, xytext=(0, 8), textcoords="offset points", ha="center", fontsize=7, zorder=6)
    plane.label(axes)
    folded = f", best over {', '.join(plane.others)}" if plane.others else ""
    axes.set_title(f"the space and the order of trials{folded}", fontsize=10)
    axes.figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9
    )


def _draw_best(steps: Sequence[SearchStep], where: Sequence[float], label: str, unit: str, axes: Axes) -> None:
    """Plot the best so far as a staircase, trials with a value as dots, others as dashes."""
    known = [(x, step.best) for x, step in zip(where, steps, strict=True) if step.best is not None]
    if known:
        known.append((max(where), known[-1][1]))
        axes.step(*zip(*known, strict=True), where="post", color=_BLUE, linewidth=2.2)
    for status, (_, color, _) in {"ok": ("", _BLUE, ""), **_MARKS}.items():
        ended = [
            (x, step.trial.value or 0.0) for x, step in zip(where, steps, strict=True) if step.trial.status == status
        ]
        _scatter(axes, ended, marker="o" if status == "ok" else "|", color=color, alpha=0.6)
    axes.set(xlabel=label, ylabel=unit, title="the best so far")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)


def _draw_prediction(trials: Sequence[Trial], what: str, axes: Axes) -> None:
    """Plot predictions against measurements; on the line both are equal."""
    both = pairs(trials, what)
    largest = max(max(pair) for pair in both)
    units = (
        ((1024.0**3, "GiB"), (1024.0**2, "MiB"), (1024.0, "KiB")) if what == "memory" else ((1.0, "s"), (1e-3, "ms"))
    )
    scale, name = _scale(largest, units)
    _scatter(axes, [(one / scale, other / scale) for one, other in both], color=_BLUE, alpha=0.6)
    axes.axline((0, 0), slope=1, color=_GRAY, linewidth=1.0, linestyle="--")
    found = agreement(trials, what)
    heading = "memory of the fullest rank" if what == "memory" else "time of a step"
    words = f"predicted / measured: median {found.ratio:.2f}" if found else ""
    axes.set(xlabel=f"predicted ({name})", ylabel=f"measured ({name})", title=f"{heading}\n{words}")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)


def _scatter(axes: Axes, spots: Sequence[tuple[float, float]], **style: Any) -> None:
    if spots:
        style = {"s": 60, "zorder": 3, **style}
        axes.scatter([x for x, _ in spots], [y for _, y in spots], **style)


def _scale(largest: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """Return the first unit with at least two of it, or the last unit."""
    return next((unit for unit in units if largest >= 2 * unit[0]), units[-1])
