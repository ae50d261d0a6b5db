"""Pipeline schedules by name, with their constraints on stages and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slapo_core import BuildError


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule of torch.distributed.pipelining.

    Args:
        name: in ``build(..., pipeline_schedule=name)``.
        class_name: of torch.
        per_rank: the number of stages per rank; None: any number.
        shape: the placement of stages: ``"loop"``: stage i on rank ``i % pp``; ``"v"``: back on the same ranks.
        allows: whether it takes a number of micro-batches on a number of ranks.
        rule: the same in words.
        splits_backward: whether gradients of inputs and of weights are computed separately.
    """

    name: str
    class_name: str
    per_rank: int | None
    shape: str
    allows: Callable[[int, int], bool]
    rule: str
    splits_backward: bool = False

    @property
    def is_single(self) -> bool:
        """Whether torch's class takes one stage instead of a list."""
        return self.per_rank == 1

    def check_micro_batches(self, count: object, pp: int) -> None:
        """Refuse a number of micro-batches that the schedule cannot run.

        Raises:
            BuildError: with the nearest allowed numbers.
        """
        if type(count) is not int or count < 1:
            raise BuildError(
                f"microbatches must be a positive number (got {count!r})", hint=f"microbatches={self.default(pp)}"
            )
        if not self.allows(count, pp):
            allowed = [number for number in range(1, max(2 * count, 4 * pp) + 1) if self.allows(number, pp)]
            near = sorted(sorted(allowed, key=lambda number: abs(number - count))[:6])
            raise BuildError(
                f"pipeline_schedule='{self.name}' does not run microbatches={count} on pp={pp} ranks: {self.rule}; "
                f"allowed near it: {', '.join(map(str, near))}",
                hint=f"microbatches={min(near, key=lambda number: (abs(number - count), -number))}",
            )

    def default(self, pp: int) -> int:
        """Return the smallest allowed number of micro-batches from ``pp`` on."""
        count = pp
        while not self.allows(count, pp):
            count += 1
        return count

    def stage_ranks(self, stages: int, pp: int) -> tuple[int, ...]:
        """Return the pipeline rank of each stage.

        Raises:
            BuildError: the schedule cannot run this number of stages.
        """
        if stages % pp or (self.per_rank is not None and stages != self.per_rank * pp):
            wanted = f"{self.per_rank * pp}" if self.per_rank is not None else f"a multiple of {pp}"
            others = ", ".join(
                repr(other.name)
                for other in SCHEDULES
                if stages % pp == 0 and (other.per_rank is None or stages == other.per_rank * pp)
            )
            raise BuildError(
                f"pipeline_schedule='{self.name}' on pp={pp} ranks needs {wanted} stages (got {stages}, by "
                f"{stages - 1} cuts)",
                hint=f"pipeline_schedule= one of {others}" if others else f"cut the model into {wanted} stages",
            )
        if self.shape == "v":
            return tuple(stage if stage < pp else 2 * pp - 1 - stage for stage in range(stages))
        return tuple(stage % pp for stage in range(stages))


def _rounds(count: int, pp: int) -> bool:
    return count % max(1, count // pp) == 0


_ROUNDS = "they must be a multiple of the rounds, microbatches // pp"

SCHEDULES = (
    PipelineSchedule("gpipe", "ScheduleGPipe", 1, "loop", lambda count, pp: True, "any number"),
    PipelineSchedule("1f1b", "Schedule1F1B", 1, "loop", lambda count, pp: count >= pp, "at least one for each stage"),
    PipelineSchedule("interleaved_1f1b", "ScheduleInterleaved1F1B", None, "loop", _rounds, _ROUNDS),
    PipelineSchedule("looped_bfs", "ScheduleLoopedBFS", None, "loop", lambda count, pp: True, "any number"),
    PipelineSchedule(
        "interleaved_zero_bubble",
        "ScheduleInterleavedZeroBubble",
        None,
        "loop",
        _rounds,
        _ROUNDS,
        splits_backward=True,
    ),
    PipelineSchedule(
        "zbv_zero_bubble", "ScheduleZBVZeroBubble", 2, "v", lambda count, pp: True, "any number", splits_backward=True
    ),
    PipelineSchedule(
        "dualpipe_v",
        "ScheduleDualPipeV",
        2,
        "v",
        lambda count, pp: count >= 2 * pp,
        "at least one for each of the 2 * pp stages",
        splits_backward=True,
    ),
)


def schedule_named(name: object, known: Sequence[PipelineSchedule] = SCHEDULES) -> PipelineSchedule:
    """Return the schedule with a name.

    Raises:
        BuildError: there is none.
    """
    for schedule in known:
        if schedule.name == name:
            return schedule
    raise BuildError(
        f"unknown pipeline_schedule {name!r}; known: {', '.join(schedule.name for schedule in known)}",
        hint='build(sch, pipeline_schedule="1f1b", microbatches=8)',
    )


def schedule_of(config: Mapping[str, Any], stages: int, pp: int) -> PipelineSchedule:
    """Return the schedule of a pipeline's options for a number of stages.

    Raises:
        BuildError: it cannot run this number of stages or micro-batches.
    """
    name = config["pipeline_schedule"]
    if name is None:
        name = "1f1b" if stages == pp else "interleaved_1f1b"
    schedule = schedule_named(name)
    schedule.check_micro_batches(config["microbatches"], pp)
    schedule.stage_ranks(stages, pp)
    return schedule
