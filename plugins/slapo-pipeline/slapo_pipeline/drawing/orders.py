"""The order in which each rank runs its work: asked of torch's own schedules."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slapo_core import ArgumentError

__all__ = ["SCHEDULES", "Work", "orders"]

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
            f"{schedule} runs {what}, and {stages} stages on {pp} ranks are something else",
            hint=f"--stages {wanted * pp} --pp {pp}",
        )
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    try:
        actions = get_schedule_ops(SCHEDULES[schedule], pp, microbatches, per_rank)
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
