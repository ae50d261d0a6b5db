"""``slapo tune``: studies from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slapo_core import Command

StudyFile = Annotated[Path, typer.Argument(metavar="STUDY.py", help="A file with a Study named `study` in it.")]
LogFile = Annotated[Path | None, typer.Option("--log", help="Another log than the study's own.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Maximum number of trials, including those already in the log.")]
Chosen = Annotated[str | None, typer.Option("--sampler", help="Another sampler than the study's own, e.g. random.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, keys sorted.")]


class TuneCommands(Command):
    """Search over schedules: run, resume, report, show, best."""

    name = "tune"

    def app(self) -> typer.Typer:
        app = typer.Typer(help="Search the best schedule of a space.", no_args_is_help=True)
        app.callback()(lambda: None)
        for command in (run, resume, report, show, best):
            app.command()(command)
        return app


def run(
    study: StudyFile,
    log: LogFile = None,
    trials: Limit = None,
    sampler: Chosen = None,
    as_json: AsJson = False,
) -> None:
    """Search a study from its beginning.

    A study with a log is continued by `slapo tune resume`. Progress goes to stderr, results to stdout. Ctrl-C
    ends the running trial and keeps all finished ones (exit status 130). Exits with status 1 if no trial was ok.
    """
    from slapo_tune.commands.actions import run_study

    run_study(study, log=log, trials=trials, sampler=sampler, as_json=as_json, resume=False)


def resume(
    study: StudyFile,
    log: LogFile = None,
    trials: Limit = None,
    sampler: Chosen = None,
    as_json: AsJson = False,
) -> None:
    """Go on with a study where its log ends.

    No finished trial is repeated; all else is as for `slapo tune run`.
    """
    from slapo_tune.commands.actions import run_study

    run_study(study, log=log, trials=trials, sampler=sampler, as_json=as_json, resume=True)


def report(
    study: StudyFile,
    log: LogFile = None,
    plot: Annotated[Path | None, typer.Option(help="Plot the search, e.g. into search.png; needs matplotlib.")] = None,
    axes: Annotated[str | None, typer.Option(help="Symbols on their axes, e.g. batch,checkpoint.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of best trials to print.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Print the results of a search.

    The best, how trials ended and why, predicted against measured, what each symbol does; works while the search runs,
    too.
    """
    from slapo_tune.commands.actions import report_study

    report_study(study, log=log, plot=plot, axes=axes, top=top, as_json=as_json)


def show(
    study: StudyFile,
    trial: Annotated[int | None, typer.Argument(min=0, help="Number of a trial. Default: the space itself.")] = None,
    log: LogFile = None,
    as_json: AsJson = False,
) -> None:
    """Show one trial, or the space.

    Of a trial: its point, how it ended and why, numbers, and the end of what its ranks printed.
    """
    from slapo_tune.commands.actions import show_study

    show_study(study, trial, log=log, as_json=as_json)


def best(
    study: StudyFile,
    log: LogFile = None,
    out: Annotated[Path | None, typer.Option(help="Write the winner's schedule document, e.g. schedule.json.")] = None,
    trial: Annotated[int | None, typer.Option(min=0, help="This trial in place of the best one.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Verify also a trial that the search has verified.")] = False,
    as_json: AsJson = False,
) -> None:
    """Verify, apply and save the best schedule.

    It is verified on real ranks, unless the search has done so, and applied to the model from its document. Exits with
    status 1 if the schedule does not agree with the reference model, or that could not be found out.
    """
    from slapo_tune.commands.actions import best_of_study

    best_of_study(study, log=log, out=out, trial=trial, again=again, as_json=as_json)
