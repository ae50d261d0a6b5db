"""The timeline as a picture."""

from __future__ import annotations

from pathlib import Path

from slapo_core import ArgumentError
from slapo_pipeline.drawing.timeline import Timeline

__all__ = ["draw"]

_COLOURS = {"F": "#4c78a8", "B": "#f58518", "I": "#eca657", "W": "#54a24b"}
_NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
_LABELLED = 400  # boxes: of more, no number could be read


def draw(timeline: Timeline, title: str, path: Path) -> None:
    """Write a picture: one row a rank, time to the right, the number of the micro-batch in each box.

    Of several stages on a rank the later ones are darker.

    Args:
        timeline: what happens when.
        title: above it.
        path: of the file; its suffix says the format, e.g. ``.png``.

    Raises:
        ArgumentError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ArgumentError(
            "drawing needs matplotlib, which is not installed", hint="pip install 'slapo-pipeline[draw]'"
        ) from error
    width = min(max(6.0, 0.28 * timeline.length), 40.0)
    figure = Figure(figsize=(width, 1.6 + 0.5 * timeline.ranks), layout="constrained")
    axes = figure.add_subplot()
    places = {
        rank: sorted({box.work.stage for box in timeline.boxes if box.rank == rank}) for rank in range(timeline.ranks)
    }
    for box in timeline.boxes:
        level = places[box.rank].index(box.work.stage)
        alpha = 0.55 + 0.45 * (level + 1) / len(places[box.rank])
        axes.broken_barh(
            [(box.start, box.end - box.start)],
            (box.rank - 0.45, 0.9),
            facecolor=_COLOURS[box.work.kind],
            alpha=alpha,
            edgecolor="white",
            linewidth=0.5,
        )
        if len(timeline.boxes) <= _LABELLED:
            middle = (box.start + box.end) / 2
            axes.text(middle, box.rank, str(box.work.microbatch), ha="center", va="center", fontsize=7, color="white")
    axes.set_yticks(range(timeline.ranks), [_row(rank, places[rank]) for rank in range(timeline.ranks)])
    axes.invert_yaxis()
    axes.set_xlim(0, timeline.length)
    axes.set_xlabel("time")
    axes.set_title(title)
    kinds = [kind for kind in _COLOURS if any(box.work.kind == kind for box in timeline.boxes)]
    axes.legend(
        handles=[Patch(color=_COLOURS[kind], label=_NAMES[kind]) for kind in kinds],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.25 if timeline.ranks < 4 else -0.15),
        ncols=len(kinds),
        frameon=False,
    )
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"the picture cannot be written: {error}", hint="--out schedule.png") from error


def _row(rank: int, stages: list[int]) -> str:
    return f"rank {rank}: {'stage' if len(stages) == 1 else 'stages'} {', '.join(map(str, stages))}"
