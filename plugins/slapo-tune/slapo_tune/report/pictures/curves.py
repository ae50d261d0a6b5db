"""The best so far, against trials and time; and what was predicted against what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slapo_core.spec.sampler import Trial
from slapo_tune.report.facts import course
from slapo_tune.report.pictures.canvas import COLOURS, new_figure
from slapo_tune.report.prediction import agreement, pairs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_best", "draw_prediction"]

_BLUE = "#2f5d9b"


def draw_best(trials: Sequence[Trial], *, unit: str = "samples/s", title: str = "") -> Figure:
    """The best so far as a staircase, and each trial as a dot: over the trials that were started, and over time.

    Args:
        trials: of the search.
        unit: of the value.
        title: above the picture.

    Raises:
        ArgumentError: matplotlib is not installed.
    """
    figure = new_figure(9.6, 4.2)
    steps = course(trials)
    scale, name = _time_unit(steps[-1].seconds if steps else 0.0)
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, label, where in (
        (left, "trials started", [float(step.started) for step in steps]),
        (right, f"time in trials ({name})", [step.seconds / scale for step in steps]),
    ):
        known = [(x, step.best) for x, step in zip(where, steps, strict=True) if step.best is not None]
        if known:
            known.append((max(where), known[-1][1]))
            axes.step(
                [x for x, _ in known],
                [best for _, best in known],
                where="post",
                color=_BLUE,
                linewidth=2.2,
                label="best so far",
                zorder=3,
            )
        fine = [(x, step.trial.value) for x, step in zip(where, steps, strict=True) if step.trial.status == "ok"]
        axes.scatter(
            [x for x, _ in fine],
            [value for _, value in fine],
            s=26,
            color=_BLUE,
            alpha=0.45,
            edgecolors="none",
            label="trial",
            zorder=2,
        )
        for status in COLOURS:
            spots = [x for x, step in zip(where, steps, strict=True) if step.trial.status == status]
            if spots:
                axes.scatter(
                    spots,
                    [0.0] * len(spots),
                    marker="|",
                    s=90,
                    linewidths=1.8,
                    color=COLOURS[status],
                    label=f"{status} (no value)",
                    zorder=4,
                    clip_on=False,
                )
        axes.set_xlabel(label)
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.grid(axis="y", color="#e3e6ea", linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    left.set_ylabel(unit)
    left.xaxis.get_major_locator().set_params(integer=True)
    handles, labels = left.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.suptitle(title or "the best so far", fontsize=11)
    return figure


def draw_prediction(trials: Sequence[Trial], *, title: str = "") -> Figure | None:
    """Predicted against measured, memory and time; on the line both are equal.

    Args:
        trials: of the search.
        title: above the picture.

    Returns:
        None where no trial has both numbers.

    Raises:
        ArgumentError: matplotlib is not installed.
    """
    shown = [what for what in ("memory", "time") if pairs(trials, what)]
    if not shown:
        return None
    figure = new_figure(4.7 * len(shown), 4.5)
    for place, what in enumerate(shown, start=1):
        both = pairs(trials, what)
        largest = max(max(pair) for pair in both)
        scale, name = _memory_unit(largest) if what == "memory" else _step_unit(largest)
        axes = figure.add_subplot(1, len(shown), place)
        axes.scatter(
            [one / scale for one, _ in both],
            [other / scale for _, other in both],
            s=30,
            color=_BLUE,
            alpha=0.6,
            edgecolors="none",
            zorder=3,
        )
        end = 1.06 * largest / scale
        axes.plot([0, end], [0, end], color="#8a8a8a", linewidth=1.0, linestyle="--", zorder=2)
        axes.set(
            xlim=(0, end), ylim=(0, end), aspect="equal", xlabel=f"predicted ({name})", ylabel=f"measured ({name})"
        )
        found = agreement(trials, what)
        words = f"predicted / measured: median {found.ratio:.2f}" if found else ""
        if found and found.correlation is not None:
            words += f", rank correlation {found.correlation:.2f}"
        heading = "memory of the fullest rank" if what == "memory" else "time of a step"
        axes.set_title(f"{heading}\n{words}", fontsize=10)
        axes.grid(color="#e3e6ea", linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def _time_unit(seconds: float) -> tuple[float, str]:
    return (3600.0, "hours") if seconds > 7200 else (60.0, "minutes") if seconds > 180 else (1.0, "seconds")


def _memory_unit(size: float) -> tuple[float, str]:
    return (1024.0**3, "GiB") if size >= 2 * 1024**3 else (1024.0**2, "MiB") if size >= 2 * 1024**2 else (1024.0, "KiB")


def _step_unit(seconds: float) -> tuple[float, str]:
    return (1.0, "s") if seconds >= 2 else (1e-3, "ms") if seconds >= 2e-3 else (1e-6, "us")
