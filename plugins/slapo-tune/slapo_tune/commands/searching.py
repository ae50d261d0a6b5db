"""``slapo tune run`` and ``slapo tune resume``."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import typer

from slapo_core import ArgumentError
from slapo_core.spec.sampler import Trial
from slapo_tune.commands.loading import load
from slapo_tune.commands.output import print_json, some, space_of, unit_of
from slapo_tune.commands.progress import Progress
from slapo_tune.errors import LogError
from slapo_tune.log.reading import read_log
from slapo_tune.report.report import Report, report
from slapo_tune.search.tuning import Result, search
from slapo_tune.study import Study

__all__ = ["run_study"]

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


def run_study(
    file: Path, *, log: Path | None, trials: int | None, sampler: str | None, as_json: bool, resume: bool
) -> None:
    """Run a study to its end.

    Args:
        file: of the study.
        log: replaces the study's own.
        trials: replaces the study's own.
        sampler: replaces the study's own.
        as_json: the report as JSON.
        resume: go on with the log that is there; else there must be none.
    """
    study = load(file, log=log, trials=trials, sampler=sampler)
    option = f" --log {log}" if log is not None else ""
    again = option + (f" --sampler {sampler}" if sampler is not None else "")
    past = _past(study, file, again, resume=resume)
    with contextlib.suppress(OSError):  # the search says that the log cannot be written
        Path(study.log).parent.mkdir(parents=True, exist_ok=True)
    space = space_of(study)
    points = some(space.points())
    unit = unit_of(study)
    progress = Progress(unit=unit, points=len(points), limit=study.trials, timeout=study.timeout, trials=past)
    try:
        with progress:
            result = search(study, resume=resume, tell=progress.tell)
    except KeyboardInterrupt:
        print(f"interrupted: all finished trials are in {study.log}; go on by", file=sys.stderr)
        print(f"  slapo tune resume {file}{again}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    found = report(points, result.trials, refused=some(space.refused()), unit=unit)
    if as_json:
        winner = {"reason": result.winner.reason, "right": result.winner.right} if result.winner else None
        print_json({**found.as_json(), "ended": result.ended, "log": str(study.log), "winner": winner})
    else:
        _print(found, result, f"{file}{option}")
    if result.winner is None or result.winner.right is False:
        raise typer.Exit(1)


def _past(study: Study, file: Path, option: str, *, resume: bool) -> tuple[Trial, ...]:
    """What the log has already.

    Raises:
        ArgumentError: it has trials, and a search is to begin; or the other way round.
    """
    log = Path(study.log)
    try:
        trials = read_log(log).trials if log.exists() else ()
    except LogError:
        trials = ()  # the search says what is wrong with it
    if trials and not resume:
        raise ArgumentError(
            f"the log {log} has {len(trials)} trials already",
            hint=f"slapo tune resume {file}{option}, or slapo tune run {file} --log ANOTHER.jsonl",
        )
    if resume and not log.exists():
        raise ArgumentError(f"there is no log {log} to go on with", hint=f"slapo tune run {file}{option}")
    return trials if resume else ()


def _print(found: Report, result: Result, words: str) -> None:
    print(found.summary())
    print(f"the search ended: {_ENDS.get(result.ended, result.ended)}")
    if found.best is None:
        for one in found.reasons[:5]:
            print(f"  {one.count} {one.status}: {one.reason}")
        print(f"slapo tune report {words} says why")
        return
    if result.winner is not None:
        print("the best schedule is verified" if result.winner.right else f"not verified: {result.winner.reason}")
    print(f"slapo tune report {words} says more")
    print(f"slapo tune best {words} --out schedule.json shows and saves the schedule")


_ENDS = {
    "space": "the sampler proposes nothing more",
    "trials": "as many trials as allowed were started",
    "budget": "the time allowed is over",
}
