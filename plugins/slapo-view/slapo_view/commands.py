"""The command ``slapo show``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slapo_core import Command
from slapo_core.cli import (
    AsJson,
    batch_for_steps,
    batch_of,
    batch_option,
    find_function,
    find_schedule,
    print_json,
    progress,
)
from slapo_estimate.commands import Loss, Microbatches, Optimizer, optimizer_of

if TYPE_CHECKING:
    from slapo_core.cli import NamedSchedule
    from slapo_view.picture import Picture


class ShowCommands(Command):
    """Show a schedule as text, as JSON or as an HTML page; or two side by side."""

    name = "show"

    def app(self) -> typer.Typer:
        app = typer.Typer()
        app.command()(show)
        return app


def show(
    schedules: Annotated[
        list[str],
        typer.Argument(
            metavar="SCHEDULE [SCHEDULE]",
            help="MODULE:FUNCTION or FILE.py:FUNCTION, which returns a schedule or a model; with --model, it applies "
            "steps to a schedule. Or a JSON file of sch.to_json(), with --model.",
        ),
    ],
    model: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="MODULE:FUNCTION", help="A function that returns the model; twice: of each."),
    ] = None,
    mesh: Annotated[
        list[str] | None,
        typer.Option("--mesh", metavar="SIZES", help="Sizes, outermost first: dp=8,tp=8; twice: side by side."),
    ] = None,
    batch: Annotated[
        list[str] | None,
        batch_option("One rank's batch, for stages and memory", "Default: the schedule's example inputs."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page of one file, which loads nothing.")
    ] = None,
    receipt: Annotated[
        Path | None,
        typer.Option("--receipt", metavar="FILE", help="What `slapo observe --json` wrote for this schedule."),
    ] = None,
    estimate: Annotated[
        bool | None,
        typer.Option("--estimate/--no-estimate", help="Estimate memory and collectives. Default: for --html."),
    ] = None,
    optimizer: Optimizer = "AdamW",
    loss: Loss = None,
    microbatches: Microbatches = None,
    pipeline_schedule: Annotated[
        str | None, typer.Option("--pipeline-schedule", help="As of `slapo pipeline draw`; default: 1f1b.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the module tree with steps, shards and bytes of a rank, stages, and memory over a training step.

    Nothing runs, and where that is possible the model has no memory. Two schedules, or one on two meshes, stand side by
    side. Modules are imported from the current directory. Example:

    slapo show bert:schedule --model bert:make_model --mesh tp=2 --batch input_ids=4x512:int64
    --batch labels=4x512:int64 --html bert.html
    """
    count = max(len(schedules), len(mesh or ()), len(model or ()))
    if count > 2:
        raise typer.BadParameter(f"at most two stand side by side (got {count})", param_hint="SCHEDULE")
    if receipt is not None and count > 1:
        raise typer.BadParameter("a receipt is of one schedule: leave the other one out", param_hint="--receipt")
    if html is not None and not html.absolute().parent.is_dir():
        raise typer.BadParameter(f"{html.absolute().parent} is not a directory", param_hint="--html")
    named = [find_schedule(_of(schedules, at), model=_of(model, at), mesh=_of(mesh, at)) for at in range(count)]
    arguments: dict[str, Any] = {
        "loss": None if loss is None else find_function(loss, "--loss"),
        "memory": html is not None if estimate is None else estimate,
        "microbatches": microbatches,
        "optimizer": optimizer_of(optimizer),
        "pipeline_schedule": pipeline_schedule,
        "receipt": receipt,
    }
    given = batch_of(batch) if batch else None
    pictures = [_picture(each, batch, given, arguments) for each in named]
    shown = pictures[0] if count == 1 else pictures[0].beside(pictures[1])
    if html is not None:
        shown.save(html)
        for note in (note for view in shown.views for note in view.data["notes"]):
            print(f"note: {note}", file=sys.stderr)
    if as_json:
        print_json(shown.to_json())
    else:
        print(shown if html is None else f"wrote {html}")


def _of(values: Sequence[str] | None, at: int) -> Any:
    """Return the value for a schedule; one value is for all."""
    return None if not values else values[min(at, len(values) - 1)]


def _picture(named: NamedSchedule, words: Sequence[str] | None, batch: Any, arguments: dict[str, Any]) -> Picture:
    from slapo_estimate.values import IntegerTracking
    from slapo_view.picture import picture

    with progress(None, "drawing") as tell:
        tell(f"the schedule {named.name}")
        with IntegerTracking():  # the estimate reads masks
            schedule = named.make(partial(batch_for_steps, words=words), on_meta=True)
        if named.make_model is not None and not words:
            schedule.example_inputs = None  # made for steps, of no training step's size
        return picture(schedule, batch, title=named.name, tell=tell, **arguments)
