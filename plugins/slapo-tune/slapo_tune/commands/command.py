"""``slapo tune``: studies from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slapo_core import Command
from slapo_core.cli import AsJson

StudyFile = Annotated[Path, typer.Argument(metavar="STUDY.py", help="A Python file with a Study named `study`.")]
LogFile = Annotated[Path | None, typer.Option("--log", help="Log to use instead of the study's.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Maximum number of trials, including those already in the log.")]
Chosen = Annotated[str | None, typer.Option("--sampler", help="Sampler to use instead of the study's, e.g. random.")]


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
    """Start the search of a study.

    `slapo tune resume` continues a search with a log. Progress goes to stderr, results to stdout. Ctrl-C ends the
    running trial and keeps all finished ones (exit status 130). Exits with status 1 if no trial was ok.
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
    """Resume the search of a study from its log.

    Finished trials are not repeated; otherwise as `slapo tune run`.
    """
    from slapo_tune.commands.actions import run_study

    run_study(study, log=log, trials=trials, sampler=sampler, as_json=as_json, resume=True)


def report(
    study: StudyFile,
    log: LogFile = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot the search, e.g. into search.png; requires matplotlib.")
    ] = None,
    axes: Annotated[str | None, typer.Option(help="Symbols on the axes of the plot, e.g. batch,checkpoint.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of best trials to print.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Print the results of a search.

    Shows the best trials, statuses and reasons, predictions against measurements, and results by candidate; also while
    the search runs.
    """
    from slapo_tune.commands.actions import report_study

    report_study(study, log=log, plot=plot, axes=axes, top=top, as_json=as_json)


def show(
    study: StudyFile,
    trial: Annotated[int | None, typer.Argument(min=0, help="Number of a trial. Default: show the space.")] = None,
    log: LogFile = None,
    as_json: AsJson = False,
) -> None:
    """Show one trial, or the space.

    Shows point, status, reason and numbers of a trial, and the end of its ranks' output.
    """
    from slapo_tune.commands.actions import show_study

    show_study(study, trial, log=log, as_json=as_json)


def best(
    study: StudyFile,
    log: LogFile = None,
    out: Annotated[Path | None, typer.Option(help="Write the winner's schedule document, e.g. schedule.json.")] = None,
    trial: Annotated[int | None, typer.Option(min=0, help="This trial instead of the best one.")] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Verify again, also if the search has verified the trial.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Verify, apply and save the best schedule.

    Verifies on real ranks, unless the search has done so, and applies the document to the model. Exits with status 1 if
    the schedule differs from the reference model or could not be verified.
    """
    from slapo_tune.commands.actions import best_of_study

    best_of_study(study, log=log, out=out, trial=trial, again=again, as_json=as_json)
