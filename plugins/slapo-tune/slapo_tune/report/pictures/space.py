"""The space as a polygon, coloured by the value; and the path of the search over it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slapo_core.spec.sampler import Point, Trial
from slapo_tune.report.facts import best_trial
from slapo_tune.report.pictures.canvas import COLOURS, new_figure
from slapo_tune.report.pictures.plane import Plane
from slapo_tune.report.words import STARTED, number, point_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_path", "draw_space"]

_MARKS = {"oom": "X", "over_memory": "^", "refused": "s", "timeout": "P", "crash": "D", "wrong": "v"}
_WORDS = {
    "oom": "out of memory when run",
    "over_memory": "predicted not to fit, not run",
    "refused": "refused by a step, not run",
    "timeout": "timeout",
    "crash": "crash",
    "wrong": "wrong result",
}
_NUMBERED = 60  # trials whose numbers are drawn along the path


def draw_space(
    points: Sequence[Point],
    trials: Sequence[Trial],
    *,
    axes: tuple[str, str] | None = None,
    unit: str = "samples/s",
    title: str = "",
) -> Figure:
    """Every point of the space at the place of two of its symbols: the value in colour, hollow where it is unknown.

    Where several points share a place, the best of them is shown.

    Args:
        points: of the space.
        trials: of the search.
        axes: the symbols on the horizontal and the vertical axis; None takes the two with the most candidates.
        unit: of the value.
        title: above the picture.

    Raises:
        ArgumentError: matplotlib is not installed; there are no two such symbols.
    """
    plane = Plane(points, trials, axes)
    figure, canvas, size = _figure(plane)
    _outline(canvas, plane)
    fine = [(where, place.value) for where, place in plane.places.items() if place.value is not None]
    if fine:
        drawn = canvas.scatter(
            [where[0] for where, _ in fine],
            [where[1] for where, _ in fine],
            c=[value for _, value in fine],
            s=size,
            cmap="viridis",
            edgecolors="white",
            linewidths=0.6,
            zorder=3,
        )
        figure.colorbar(drawn, ax=canvas, label=unit, pad=0.02)
    _marks(canvas, plane, size)
    winner = best_trial(trials)
    if winner is not None:
        x, y = plane.at(winner.point)
        label = f"best: {number(winner.value or 0.0)} {unit}"
        canvas.scatter(
            [x],
            [y],
            s=2.1 * size,
            marker="o",
            facecolors="none",
            edgecolors="#c03a2b",
            linewidths=2.2,
            zorder=5,
            label=label,
        )
    folded = f"best over {', '.join(plane.others)}" if plane.others else ""
    _finish(canvas, plane, title or "the space", folded)
    return figure


def draw_path(
    points: Sequence[Point],
    trials: Sequence[Trial],
    *,
    axes: tuple[str, str] | None = None,
    unit: str = "samples/s",
    title: str = "",
) -> Figure:
    """In which order the search went over the space: trials that were started, numbered from 1, early ones dark.

    Args:
        points: of the space.
        trials: of the search.
        axes: as of :func:`draw_space`.
        unit: of the value.
        title: above the picture.

    Raises:
        ArgumentError: matplotlib is not installed; there are no two such symbols.
    """
    plane = Plane(points, trials, axes)
    figure, canvas, size = _figure(plane)
    _outline(canvas, plane)
    pruned = ("over_memory", "refused")
    _marks(canvas, plane, size, only=pruned)
    _hollow(canvas, [where for where, place in plane.places.items() if place.status not in pruned], size)
    started = [trial for trial in trials if trial.status in STARTED]
    way = [plane.at(trial.point) for trial in started]
    for (x, y), (to_x, to_y) in itertools.pairwise(way):
        arrow = {
            "arrowstyle": "-|>",
            "color": "#555555",
            "lw": 0.9,
            "alpha": 0.75,
            "shrinkA": 9,
            "shrinkB": 9,
            "connectionstyle": "arc3,rad=0.12",
        }
        canvas.annotate("", xy=(to_x, to_y), xytext=(x, y), arrowprops=arrow, zorder=3)
    if way:
        order = list(range(1, len(way) + 1))
        drawn = canvas.scatter(
            [x for x, _ in way],
            [y for _, y in way],
            c=order,
            s=1.5 * size,
            cmap="cividis",
            edgecolors="white",
            linewidths=0.6,
            zorder=4,
        )
        if len(way) > 1:
            figure.colorbar(drawn, ax=canvas, label="trials started", pad=0.02)
        _numbers(canvas, way, len(way))
    winner = best_trial(trials)
    if winner is not None:
        x, y = plane.at(winner.point)
        canvas.scatter(
            [x],
            [y],
            s=2.6 * size,
            facecolors="none",
            edgecolors="#c03a2b",
            linewidths=2.2,
            zorder=5,
            label=f"best: {number(winner.value or 0.0)} {unit}",
        )
    _finish(canvas, plane, title or "the path of the search", f"best: {point_words(winner.point)}" if winner else "")
    return figure


def _figure(plane: Plane) -> tuple[Figure, Axes, float]:
    across, up = plane.spread()
    width, height = min(max(6.4, 2.6 + 0.5 * across), 14.0), min(max(4.4, 2.0 + 0.45 * up), 9.0)
    figure = new_figure(width, height)
    cell = min(72 * (width - 2.4) / across, 72 * (height - 1.6) / up)
    return figure, figure.add_subplot(), min(max(0.32 * cell, 5.0), 13.0) ** 2


def _outline(canvas: Axes, plane: Plane) -> None:
    edge = plane.edge()
    if len({x for x, _ in edge}) > 1 and len({y for _, y in edge}) > 1:
        canvas.fill(
            [x for x, _ in edge],
            [y for _, y in edge],
            facecolor="#f1f3f6",
            edgecolor="#b9c0ca",
            linewidth=1.2,
            joinstyle="round",
            zorder=1,
        )


def _marks(canvas: Axes, plane: Plane, size: float, only: Sequence[str] = tuple(_MARKS)) -> None:
    by_status: dict[str, list[tuple[float, float]]] = {}
    for where, place in plane.places.items():
        by_status.setdefault(place.status, []).append(where)
    for status in only:
        spots = by_status.get(status)
        if spots:
            canvas.scatter(
                [x for x, _ in spots],
                [y for _, y in spots],
                s=0.75 * size,
                marker=_MARKS[status],
                color=COLOURS[status],
                edgecolors="white",
                linewidths=0.5,
                zorder=3,
                label=_WORDS[status],
            )
    if len(only) == len(_MARKS):
        _hollow(canvas, by_status.get("", []), size, label="not tried")


def _hollow(canvas: Axes, spots: Sequence[tuple[float, float]], size: float, label: str | None = None) -> None:
    if spots:
        canvas.scatter(
            [x for x, _ in spots],
            [y for _, y in spots],
            s=0.6 * size,
            facecolors="white",
            edgecolors="#7f8894",
            linewidths=1.0,
            zorder=2,
            label=label,
        )


def _numbers(canvas: Axes, way: Sequence[tuple[float, float]], last: int) -> None:
    """The number of each trial; where several share a place, all of them beside it."""
    if len(way) > _NUMBERED:
        return
    at: dict[tuple[float, float], list[int]] = {}
    for index, where in enumerate(way, start=1):
        at.setdefault(where, []).append(index)
    for (x, y), numbers in at.items():
        if len(numbers) == 1:
            dark = numbers[0] < 0.6 * last
            canvas.text(
                x,
                y,
                str(numbers[0]),
                ha="center",
                va="center",
                fontsize=7,
                color="white" if dark else "black",
                zorder=6,
            )
        else:
            words: Any = ", ".join(map(str, numbers)) if len(numbers) < 4 else f"{numbers[0]} ... {numbers[-1]}"
            canvas.annotate(words, (x, y), xytext=(0, 9), textcoords="offset points", ha="center", fontsize=7, zorder=6)


def _finish(canvas: Axes, plane: Plane, title: str, below: str) -> None:
    plane.label(canvas)
    canvas.set_title(f"{title}\n{below}" if below else title, fontsize=11)
    for side in ("top", "right"):
        canvas.spines[side].set_visible(False)
    handles, labels = canvas.get_legend_handles_labels()
    if handles:
        canvas.figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=min(len(handles), 3),
            frameon=False,
            fontsize=9,
            markerscale=0.8,
        )
