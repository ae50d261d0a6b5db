"""All pictures of a search, as files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slapo_core.spec.sampler import Point, Trial
from slapo_tune.report.pictures.canvas import save
from slapo_tune.report.pictures.curves import draw_best, draw_prediction
from slapo_tune.report.pictures.space import draw_path, draw_space
from slapo_tune.report.symbols import candidates, symbols

__all__ = ["write_pictures"]


def write_pictures(
    points: Sequence[Point],
    trials: Sequence[Trial],
    directory: Path,
    *,
    axes: tuple[str, str] | None = None,
    unit: str = "samples/s",
    title: str = "",
) -> list[Path]:
    """Write ``space.png``, ``path.png``, ``best.png`` and, where anything was predicted, ``prediction.png``.

    A space that has fewer than two symbols with several candidates has no picture of itself.

    Args:
        points: of the space.
        trials: of the search.
        directory: it is made; files of these names are overwritten.
        axes: the symbols on the axes of the space; None takes the two with the most candidates.
        unit: of the value.
        title: of the search, e.g. its file.

    Returns:
        the files.

    Raises:
        ArgumentError: matplotlib is not installed; there are no such symbols; nothing can be written.
    """
    before = f"{title}: " if title else ""
    written: list[Path] = []
    if axes is not None or sum(len(candidates(points, name)) > 1 for name in symbols(points)) > 1:
        space = draw_space(points, trials, axes=axes, unit=unit, title=f"{before}the space")
        path = draw_path(points, trials, axes=axes, unit=unit, title=f"{before}the path of the search")
        written += [save(space, directory / "space.png"), save(path, directory / "path.png")]
    best = draw_best(trials, unit=unit, title=f"{before}the best so far")
    written.append(save(best, directory / "best.png"))
    prediction = draw_prediction(trials, title=f"{before}predicted and measured" if title else "")
    if prediction is not None:
        written.append(save(prediction, directory / "prediction.png"))
    return written
