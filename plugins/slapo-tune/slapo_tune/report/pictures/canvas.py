"""Figures: made where matplotlib is installed, written as PNG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from slapo_core import ArgumentError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "new_figure", "save"]

COLOURS = {
    "oom": "#c03a2b",
    "over_memory": "#e08a1e",
    "refused": "#8a8a8a",
    "timeout": "#7b4ea3",
    "crash": "#000000",
    "wrong": "#c2277d",
}
"""Of everything that did not end well; what did is coloured by its value."""


def new_figure(width: float, height: float) -> Figure:
    """An empty figure.

    Args:
        width: in inches.
        height: in inches.

    Raises:
        ArgumentError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ArgumentError(
            "plots need matplotlib, which is not installed", hint="pip install 'slapo-tune[draw]'"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, file: Path) -> Path:
    """Write a figure.

    Args:
        figure: of :func:`new_figure`.
        file: ending in ``.png``; directories are made.

    Raises:
        ArgumentError: it cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=130)
    except OSError as error:
        raise ArgumentError(f"the picture cannot be written: {error}", hint="--plots DIRECTORY") from error
    return file
