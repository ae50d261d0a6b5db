"""``slapo tune report``."""

from __future__ import annotations

import sys
from pathlib import Path

from slapo_core import ArgumentError
from slapo_tune.commands.loading import load
from slapo_tune.commands.output import print_json, read, some, space_of, unit_of
from slapo_tune.report.pictures.writing import write_pictures
from slapo_tune.report.report import report

__all__ = ["report_study"]


def report_study(
    file: Path, *, log: Path | None, plots: Path | None, axes: str | None, top: int, as_json: bool
) -> None:
    """Print what a search found, and write its pictures.

    Args:
        file: of the study.
        log: replaces the study's own.
        plots: directory of the pictures; None for none.
        axes: two symbols, with a comma between them; None takes the two with the most candidates.
        top: so many of the best trials.
        as_json: everything as JSON.

    Raises:
        ArgumentError: ``axes`` are not two symbols.
    """
    chosen = _axes(axes)
    study = load(file, log=log)
    trials = read(study, file).trials
    space = space_of(study)
    points, unit = some(space.points()), unit_of(study)
    found = report(points, trials, refused=some(space.refused()), unit=unit)
    written = []
    if plots is not None:
        written = write_pictures(points, trials, plots, axes=chosen, unit=unit, title=file.name)
    if as_json:
        print_json({**found.as_json(), "log": str(study.log), "pictures": [str(one) for one in written]})
        return
    found.print(top=top)
    for one in written:
        print(f"wrote {one}", file=sys.stderr)


def _axes(text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    names = [name.strip() for name in text.split(",")]
    if len(names) != 2:
        raise ArgumentError(f"--axes must be two symbols (got {text!r})", hint="--axes batch,checkpoint")
    return (names[0], names[1])
