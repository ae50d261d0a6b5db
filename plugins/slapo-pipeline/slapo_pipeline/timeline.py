"""Simulate and draw pipeline schedules: `slapo pipeline draw`."""

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
        app.callback()(lambda: None)  # a command with subcommands, of which there is one
        app.command()(draw)
        return app


def draw(
    schedule: Annotated[str, typer.Option(help="gpipe, 1f1b, interleaved_1f1b, looped_bfs, ...")] = "1f1b",
    stages: Annotated[int, typer.Option(help="Stages of the pipeline.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Micro-batches of a step.")] = 8,
    pp: Annotated[int | None, typer.Option(help="Ranks. Default: as many as the schedule needs.")] = None,
    forward: Annotated[float, typer.Option(help="Time of a forward of one stage.")] = 1.0,
    backward: Annotated[float, typer.Option(help="Time of its backward.")] = 2.0,
    out: Annotated[Path | None, typer.Option(help="Picture to write, e.g. schedule.png; needs matplotlib.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every action with its time, as JSON.")] = False,
) -> None:
    """Show the ranks' work over time, and the fraction of time in which ranks wait: the bubble.

    The order is torch's own. All stages take the same time, and messages none.
    """
    if not (forward > 0 and backward > 0):
        got = f"{forward:g} and {backward:g}"
        raise ArgumentError(f"times must be positive (got {got})", hint="--forward 1 --backward 2")
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
            {"rank": each.rank, "start": each.start, "end": each.end, **dataclasses.asdict(each.action)}
            for each in timeline.actions
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
_LABELED = 400  # actions: numbers of more would be unreadable


def draw_picture(timeline: Timeline, title: str, path: Path) -> None:
    """Write a picture: a row per rank, time to the right, a labeled bar per micro-batch.

    Of several stages on a rank the later ones are darker.

    Args:
        timeline: of a step.
        title: above the picture.
        path: of the file; its suffix is the format, e.g. ``.png``.

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
    figure = Figure(
        figsize=(min(max(6.0, 0.28 * timeline.length), 40.0), 1.6 + 0.5 * timeline.ranks), layout="constrained"
    )
    axes = figure.add_subplot(title=title, xlabel="time", xlim=(0, timeline.length))
    timed = timeline.actions
    stages = [sorted({each.action.stage for each in timed if each.rank == rank}) for rank in range(timeline.ranks)]
    shades = [0.55 + 0.45 * (stages[one.rank].index(one.action.stage) + 1) / len(stages[one.rank]) for one in timed]
    axes.barh(
        [each.rank for each in timed],
        [each.end - each.start for each in timed],
        left=[each.start for each in timed],
        height=0.9,
        color=[(_COLORS[each.action.kind], shade) for each, shade in zip(timed, shades, strict=True)],
        edgecolor="white",
        linewidth=0.5,
    )
    for each in timed if len(timed) <= _LABELED else ():
        middle = (each.start + each.end) / 2
        axes.text(middle, each.rank, str(each.action.microbatch), ha="center", va="center", fontsize=7, color="white")
    axes.set_yticks(range(timeline.ranks), [_row(rank, own) for rank, own in enumerate(stages)])
    axes.invert_yaxis()
    kinds = [kind for kind in _COLORS if any(each.action.kind == kind for each in timed)]
    patches = [Patch(color=_COLORS[kind], label=_NAMES[kind]) for kind in kinds]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(kinds), frameon=False)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"the picture cannot be written: {error}", hint="--out schedule.png") from error


def _row(rank: int, stages: list[int]) -> str:
    return f"rank {rank}: {'stage' if len(stages) == 1 else 'stages'} {', '.join(map(str, stages))}"


@dataclass(frozen=True)
class TimedAction:
    """An action of a rank with its time.

    Args:
        rank: along ``pp``.
        action: a forward or backward of one micro-batch.
        start: in units of time.
        end: in units of time.
    """

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The actions of all ranks in one step.

    Args:
        actions: sorted by rank and time.
        ranks: number of ranks.
    """

    actions: tuple[TimedAction, ...]
    ranks: int

    @property
    def length(self) -> float:
        """Time from the first start to the last end."""
        return max(each.end for each in self.actions)

    @property
    def bubble(self) -> float:
        """Fraction of the ranks' time in which they wait, from 0 to 1."""
        busy = sum(each.end - each.start for each in self.actions)
        return 1 - busy / (self.length * self.ranks)


def simulate(orders: Sequence[Sequence[Action]], *, forward: float = 1.0, backward: float = 2.0) -> Timeline:
    """Start every action, in its rank's order, as soon as the rank is free and its inputs are ready.

    Messages take no time; a split backward takes half of its time for the inputs and half for the weights.

    Args:
        orders: the actions of each rank.
        forward: time of a stage's forward.
        backward: time of a stage's backward.

    Raises:
        ValueError: the ranks wait for each other.
    """
    times = {"F": forward, "B": backward, "I": backward / 2, "W": backward / 2}
    last = max(action.stage for order in orders for action in order)
    done: dict[Action, float] = {}
    free = [0.0] * len(orders)
    position = [0] * len(orders)
    timed: list[TimedAction] = []
    while any(position[rank] < len(order) for rank, order in enumerate(orders)):
        before = len(timed)
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                action = order[position[rank]]
                ready = [_done(done, needed) for needed in _needs(action, last)]
                if any(time is None for time in ready):
                    break
                start = max(free[rank], *(time for time in ready if time is not None), 0.0)
                done[action] = free[rank] = start + times[action.kind]
                timed.append(TimedAction(rank, action, start, free[rank]))
                position[rank] += 1
        if len(timed) == before:
            waiting = next(order[place] for order, place in zip(orders, position, strict=True) if place < len(order))
            raise ValueError(f"every rank waits for another one; the first waits to start {waiting}")
    return Timeline(tuple(sorted(timed, key=lambda each: (each.rank, each.start))), len(orders))


def _needs(action: Action, last: int) -> Iterator[Action]:
    """Yield the actions that must end before; ``B`` of the next stage may be ``I`` there."""
    if action.kind == "F":
        if action.stage:
            yield Action("F", action.stage - 1, action.microbatch)
    elif action.kind == "W":
        yield Action("I", action.stage, action.microbatch)
    else:
        yield Action("F", action.stage, action.microbatch)
        if action.stage < last:
            yield Action("B", action.stage + 1, action.microbatch)


def _done(done: dict[Action, float], action: Action) -> float | None:
    """Return the end of an action, or of a backward's input half; None before it."""
    found = done.get(action)
    return done.get(Action("I", action.stage, action.microbatch)) if found is None and action.kind == "B" else found


SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv_zero_bubble": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}
"""Names of ``build(..., pipeline_schedule=...)`` -> torch's names."""

_ONE_STAGE = ("gpipe", "1f1b")
_TWO_STAGES = ("zbv_zero_bubble", "dualpipe_v")


@dataclass(frozen=True)
class Action:
    """A forward or backward of one stage and micro-batch.

    Args:
        kind: ``"F"`` forward, ``"B"`` backward, or of a split backward: ``"I"`` for the inputs, ``"W"`` for weights.
        stage: from 0.
        microbatch: from 0.
    """

    kind: str
    stage: int
    microbatch: int


def orders(schedule: str, *, stages: int, microbatches: int, pp: int | None = None) -> list[list[Action]]:
    """Return the actions of each rank, in torch's order.

    Args:
        schedule: one of :data:`SCHEDULES`.
        stages: number of stages of the pipeline.
        microbatches: number of micro-batches of a step.
        pp: number of ranks; the default is one for each stage, or for each two where a rank has several.

    Raises:
        ArgumentError: torch has no such schedule, or its schedule refuses these numbers.
    """
    if schedule not in SCHEDULES:
        raise ArgumentError(
            f"there is no schedule {schedule!r}", hint=f"one of {', '.join(SCHEDULES)}: --schedule 1f1b"
        )
    if pp is None:
        pp = stages if schedule in _ONE_STAGE else max(stages // 2, 1)
    if pp < 1 or stages < 1 or microbatches < 1:
        raise ArgumentError(
            f"stages, ranks and micro-batches must be 1 or more (got {stages}, {pp} and {microbatches})",
            hint="--stages 4 --microbatches 8 --pp 4",
        )
    per_rank, rest = divmod(stages, pp)
    wanted = 1 if schedule in _ONE_STAGE else 2
    exactly = schedule in _ONE_STAGE or schedule in _TWO_STAGES
    if rest or per_rank < wanted or (exactly and per_rank != wanted):
        what = f"{wanted} {'stage' if wanted == 1 else 'stages'} on each rank{'' if exactly else ' or more'}"
        raise ArgumentError(
            f"{schedule} runs {what} (got {stages} stages on {pp} ranks)",
            hint=f"--stages {wanted * pp} --pp {pp}",
        )
    try:
        actions = schedule_actions(SCHEDULES[schedule], pp, microbatches, per_rank)
    except (AssertionError, ValueError) as error:  # torch's checks of the numbers
        raise ArgumentError(
            f"torch refuses {schedule} on {pp} ranks: {error}", hint=f"--microbatches {2 * pp}"
        ) from error
    order = [[own for action in rank for own in _actions(action)] for rank in actions]
    return [_in_turn(rank) for rank in order] if schedule in _ONE_STAGE else order


def _in_turn(order: list[Action]) -> list[Action]:
    """Number micro-batches in their order: torch's listing of 1F1B begins at 1 on the last rank."""
    counts = {"F": itertools.count(), "B": itertools.count()}
    return [Action(action.kind, action.stage, next(counts[action.kind])) for action in order]


def _actions(action: Any) -> Iterator[Action]:
    """Yield the computations of torch's action; idling, messages and reductions take no time here."""
    if action is None:
        return
    if action.sub_actions is not None:  # several that torch interleaves: one after the other
        for below in action.sub_actions:
            yield from _actions(below)
    elif action.computation_type.value in ("F", "B", "I", "W"):
        yield Action(action.computation_type.value, action.stage_index, action.microbatch_index)
