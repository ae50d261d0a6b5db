"""Draw pipeline schedules: `slapo pipeline draw`."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from slapo_core import ArgumentError, Command
from slapo_pipeline.private import schedule_actions


class PipelineCommands(Command):
    """Draw the timeline of a pipeline schedule."""

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
            {"rank": box.rank, "start": box.start, "end": box.end, **dataclasses.asdict(box.work)}
            for box in timeline.boxes
        ],
        "bubble": timeline.bubble,
        "microbatches": microbatches,
        "ranks": timeline.ranks,
        "schedule": schedule,
        "stages": stages,
        "time": timeline.length,
    }


_COLORS = {"F": "#4c78a8", "B": "#f58518", "I": "#eca657", "W": "#54a24b"}
_NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
_LABELED = 400  # boxes: of more, no number could be read


def draw_picture(timeline: Timeline, title: str, path: Path) -> None:
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
            facecolor=_COLORS[box.work.kind],
            alpha=alpha,
            edgecolor="white",
            linewidth=0.5,
        )
        if len(timeline.boxes) <= _LABELED:
            middle = (box.start + box.end) / 2
            axes.text(middle, box.rank, str(box.work.microbatch), ha="center", va="center", fontsize=7, color="white")
    axes.set_yticks(range(timeline.ranks), [_row(rank, places[rank]) for rank in range(timeline.ranks)])
    axes.invert_yaxis()
    axes.set_xlim(0, timeline.length)
    axes.set_xlabel("time")
    axes.set_title(title)
    kinds = [kind for kind in _COLORS if any(box.work.kind == kind for box in timeline.boxes)]
    axes.legend(
        handles=[Patch(color=_COLORS[kind], label=_NAMES[kind]) for kind in kinds],
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


@dataclass(frozen=True)
class Box:
    """Work at its time.

    Args:
        rank: that does it.
        work: what.
        start: in units of time.
        end: likewise.
    """

    rank: int
    work: Work
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A step of all ranks.

    Args:
        boxes: sorted by rank and time.
        ranks: how many.
    """

    boxes: tuple[Box, ...]
    ranks: int

    @property
    def length(self) -> float:
        """From the first start to the last end."""
        return max(box.end for box in self.boxes)

    @property
    def bubble(self) -> float:
        """The part of the ranks' time in which they wait, from 0 to 1."""
        busy = sum(box.end - box.start for box in self.boxes)
        return 1 - busy / (self.length * self.ranks)


def simulate(orders: Sequence[Sequence[Work]], *, forward: float = 1.0, backward: float = 2.0) -> Timeline:
    """Let every rank do its work in its order, each piece as soon as the rank and what the piece needs are ready.

    Messages take no time; a backward in two takes half of its time for the inputs and half for the weights.

    Args:
        orders: what each rank does.
        forward: time of a forward of one stage.
        backward: time of its backward.

    Raises:
        ValueError: the ranks wait for each other.
    """
    times = {"F": forward, "B": backward, "I": backward / 2, "W": backward / 2}
    last = max(work.stage for order in orders for work in order)
    done: dict[Work, float] = {}
    free = [0.0] * len(orders)
    position = [0] * len(orders)
    boxes: list[Box] = []
    while any(position[rank] < len(order) for rank, order in enumerate(orders)):
        before = len(boxes)
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                work = order[position[rank]]
                ready = [_done(done, needed) for needed in _needs(work, last)]
                if any(time is None for time in ready):
                    break
                start = max(free[rank], *(time for time in ready if time is not None), 0.0)
                done[work] = free[rank] = start + times[work.kind]
                boxes.append(Box(rank, work, start, free[rank]))
                position[rank] += 1
        if len(boxes) == before:
            waiting = next(order[place] for order, place in zip(orders, position, strict=True) if place < len(order))
            raise ValueError(f"every rank waits for another one, the first of them to do {waiting}")
    return Timeline(tuple(sorted(boxes, key=lambda box: (box.rank, box.start))), len(orders))


def _needs(work: Work, last: int) -> Iterator[Work]:
    """What must be done before: of a backward, either form of the next stage's."""
    if work.kind == "F":
        if work.stage:
            yield Work("F", work.stage - 1, work.microbatch)
    elif work.kind == "W":
        yield Work("I", work.stage, work.microbatch)
    else:
        yield Work("F", work.stage, work.microbatch)
        if work.stage < last:
            yield Work("B", work.stage + 1, work.microbatch)


def _done(done: dict[Work, float], work: Work) -> float | None:
    if work.kind == "B":
        in_two = Work("I", work.stage, work.microbatch)
        return done.get(work, done.get(in_two))
    return done.get(work)


SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv_zero_bubble": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}
"""The names of ``build(..., pipeline_schedule=...)``, and what torch calls them."""

_ONE_STAGE = ("gpipe", "1f1b")
_TWO_STAGES = ("zbv_zero_bubble", "dualpipe_v")


@dataclass(frozen=True)
class Work:
    """One thing that a rank does.

    Args:
        kind: ``"F"`` forward, ``"B"`` backward, or of a backward in two: ``"I"`` for the inputs, ``"W"`` for weights.
        stage: from 0.
        microbatch: from 0.
    """

    kind: str
    stage: int
    microbatch: int


def ranks_for(schedule: str, stages: int) -> int:
    """How many ranks run so many stages where nothing else is said: one stage each, or two where that is the least."""
    return stages if schedule in _ONE_STAGE else max(stages // 2, 1)


def orders(schedule: str, *, stages: int, microbatches: int, pp: int | None = None) -> list[list[Work]]:
    """What each rank does, in its order.

    Args:
        schedule: one of :data:`SCHEDULES`.
        stages: of the whole pipeline.
        microbatches: of one step.
        pp: number of ranks; the default is one for each stage, or for each two where a rank has several.

    Raises:
        ArgumentError: torch has no such schedule, or it does not take these numbers.
    """
    if schedule not in SCHEDULES:
        raise ArgumentError(
            f"there is no schedule {schedule!r}", hint=f"one of {', '.join(SCHEDULES)}: --schedule 1f1b"
        )
    pp = ranks_for(schedule, stages) if pp is None else pp
    if pp < 1 or stages < 1 or microbatches < 1:
        raise ArgumentError(
            f"stages, ranks and micro-batches are 1 or more (got {stages}, {pp} and {microbatches})",
            hint="--stages 4 --microbatches 8 --pp 4",
        )
    per_rank, rest = divmod(stages, pp)
    wanted = 1 if schedule in _ONE_STAGE else 2
    exactly = schedule in _ONE_STAGE or schedule in _TWO_STAGES
    if rest or per_rank < wanted or (exactly and per_rank != wanted):
        what = f"{wanted} {'stage' if wanted == 1 else 'stages'} on each rank{'' if exactly else ' or more'}"
        raise ArgumentError(
            f"{schedule} runs {what}, and got {stages} stages on {pp} ranks",
            hint=f"--stages {wanted * pp} --pp {pp}",
        )
    try:
        actions = schedule_actions(SCHEDULES[schedule], pp, microbatches, per_rank)
    except (AssertionError, ValueError) as error:  # what torch says about numbers that it does not take
        raise ArgumentError(
            f"torch refuses {schedule} on {pp} ranks: {error}", hint=f"--microbatches {2 * pp}"
        ) from error
    order = [[work for action in rank for work in _work(action)] for rank in actions]
    return [_in_turn(rank) for rank in order] if schedule in _ONE_STAGE else order


def _in_turn(order: list[Work]) -> list[Work]:
    """The same with micro-batches counted in their order, as these schedules run them.

    Where torch writes the order of 1F1B down, it begins to count on the last rank at 1.
    """
    counts = {"F": itertools.count(), "B": itertools.count()}
    return [Work(work.kind, work.stage, next(counts[work.kind])) for work in order]


def _work(action: Any) -> Iterator[Work]:
    """What counts of an action: not idling, nor messages and reductions, which take no time here."""
    if action is None:
        return
    if action.sub_actions is not None:  # several that torch interleaves: one after the other
        for below in action.sub_actions:
            yield from _work(below)
    elif action.computation_type.value in ("F", "B", "I", "W"):
        yield Work(action.computation_type.value, action.stage_index, action.microbatch_index)
