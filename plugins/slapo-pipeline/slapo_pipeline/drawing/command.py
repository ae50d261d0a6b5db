"""``slapo pipeline``: what can be seen of a pipeline without running it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slapo_core import Command

if TYPE_CHECKING:
    from slapo_pipeline.drawing.timeline import Timeline

__all__ = ["PipelineCommands"]


class PipelineCommands(Command):
    """``slapo pipeline draw``."""

    name = "pipeline"

    def app(self) -> typer.Typer:
        app = typer.Typer(help="Pipeline schedules, without running them.", no_args_is_help=True)
        app.callback()(lambda: None)  # a family, though there is one command so far
        app.command()(draw)
        return app


def draw(
    schedule: Annotated[str, typer.Option(help="gpipe, 1f1b, interleaved_1f1b, looped_bfs, ...")] = "1f1b",
    stages: Annotated[int, typer.Option(help="Stages of the whole pipeline.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Micro-batches of a step.")] = 8,
    pp: Annotated[int | None, typer.Option(help="Ranks. Default: as many as the schedule needs.")] = None,
    forward: Annotated[float, typer.Option(help="Time of a forward of one stage.")] = 1.0,
    backward: Annotated[float, typer.Option(help="Time of its backward.")] = 2.0,
    out: Annotated[Path | None, typer.Option(help="Picture to write, e.g. schedule.png; needs matplotlib.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what happens when, as JSON.")] = False,
) -> None:
    """Show when each rank of a pipeline works, and which part of the time it waits: the bubble.

    The order is that of torch's own schedule. Stages take the same time, and messages none.
    """
    from slapo_core import ArgumentError
    from slapo_pipeline.drawing.orders import orders
    from slapo_pipeline.drawing.picture import draw as draw_picture
    from slapo_pipeline.drawing.timeline import simulate

    if not (forward > 0 and backward > 0):
        raise ArgumentError(f"times are positive (got {forward:g} and {backward:g})", hint="--forward 1 --backward 2")
    work = orders(schedule, stages=stages, microbatches=microbatches, pp=pp)
    timeline = simulate(work, forward=forward, backward=backward)
    title = (
        f"{schedule}: {stages} stages on {timeline.ranks} ranks, {microbatches} micro-batches, "
        f"bubble {100 * timeline.bubble:.1f} %"
    )
    if out is not None:
        draw_picture(timeline, title, out)
    if as_json:
        print(json.dumps(_as_json(timeline, schedule, stages, microbatches), indent=2, sort_keys=True))
        return
    print(title)
    print(f"{timeline.length:g} units of time for a step; a stage takes {forward:g} forward and {backward:g} backward")
    if out is not None:
        print(f"wrote {out}")


def _as_json(timeline: Timeline, schedule: str, stages: int, microbatches: int) -> dict[str, object]:
    return {
        "actions": [
            {
                "end": box.end,
                "kind": box.work.kind,
                "microbatch": box.work.microbatch,
                "rank": box.rank,
                "stage": box.work.stage,
                "start": box.start,
            }
            for box in timeline.boxes
        ],
        "bubble": timeline.bubble,
        "microbatches": microbatches,
        "ranks": timeline.ranks,
        "schedule": schedule,
        "stages": stages,
        "time": timeline.length,
    }
