"""Training steps of one rank of a pipeline: its own stages, their micro-batches in the schedule's order, its messages.

What runs the stages is what target ``"torch"`` runs them with, over a process group without peers: so the order of
passes, how many micro-batches are in flight (on the first stage as many as there are stages, with 1F1B), what is
received and what is kept until it is sent are its own, and nothing is modeled. Values that come from another stage
are tensors like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from slapo_core.building.batches import LossCall, micro_batches
from slapo_core.building.target import Arguments, Target, stages_of_build
from slapo_core.errors import ArgumentError, BuildError
from slapo_core.estimation.step import optimizer_of, state_of
from slapo_core.estimation.values import Values
from slapo_core.estimation.watch import Watch
from slapo_core.pipeline.binding import bound_batch
from slapo_core.pipeline.staged import Staged, needing
from slapo_core.private import FakeTensorMode
from slapo_core.weights.correspondence import Correspondence, placed
from slapo_core.weights.gradients import TiedGradients

if TYPE_CHECKING:
    from slapo_core.estimation.child import Request, Trackers
    from slapo_core.estimation.results import RankEstimate
    from slapo_core.schedule.schedule import Schedule
    from slapo_core.spec.dialect import Plan

__all__ = ["Pipeline", "pipeline_of", "train_stages", "with_waiting"]


@dataclass(frozen=True)
class Pipeline:
    """A model that is cut, before its tensors lose their memory.

    Args:
        staged: the stages, for one micro-batch.
        ranks: the rank along ``pp`` of each stage.
        pieces: the micro-batches of the batch.
        dialect: of target ``"torch"``.
        plan: its own.
    """

    staged: Staged
    ranks: tuple[int, ...]
    pieces: list[Any]
    dialect: Any
    plan: Plan

    @property
    def share(self) -> float:
        """Of another rank's time, what a rank waits while the pipeline fills and drains.

        With ``v`` stages a rank and ``m`` micro-batches, it waits for one of ``v * m`` turns of each other rank.
        """
        turns = len(self.ranks) // len(set(self.ranks)) * len(self.pieces)
        return 1 / turns


def with_waiting(kinds: Sequence[RankEstimate], share: float) -> tuple[RankEstimate, ...]:
    """Ranks with the time that they wait for those of other stages.

    Args:
        kinds: one for each place along ``pp``; without a device they have no time.
        share: see :attr:`Pipeline.share`; 0 where there is no pipeline.
    """
    busy = sum(kind.time or 0.0 for kind in kinds)
    return tuple(
        kind if kind.time is None else replace(kind, time=kind.time + share * (busy - kind.time)) for kind in kinds
    )


def pipeline_of(schedule: Schedule, request: Request) -> Pipeline | None:
    """The pipeline of a schedule; None where it has one rank along ``pp``.

    Raises:
        ArgumentError: there is one rank, and options.
        BuildError: as :func:`slapo_core.build` would: stages and mesh, the options, or the batch do not go together.
        TraceError: the model cannot be cut there.
    """
    pp = schedule.mesh.size("pp") if schedule.mesh is not None else 1
    if pp == 1:
        if request.config:
            raise ArgumentError(
                f"estimate takes no option {', '.join(map(repr, request.config))} where there is one rank along 'pp'",
                hint='mesh={"pp": 4}, microbatches=8 for a pipeline; accumulate=8 for micro-batches on one rank',
            )
        return None
    arguments = Arguments(request.optimizer, None, request.loss, None, None, 0, request.accumulate)
    target = Target.named("torch", schedule)
    plan = target.plan(schedule, request.config, arguments.for_plan())
    count, axes = plan.config["microbatches"], plan.config["batch_axes"]
    if request.accumulate > 1:
        raise BuildError(
            f"a pipeline accumulates gradients over its micro-batches (got accumulate={request.accumulate})",
            hint=f"microbatches={request.accumulate * count}, and no accumulate",
        )
    correspondence, _ = Correspondence.of(schedule)
    pieces = micro_batches(request.batch, count, option="microbatches", axes=axes)
    schedule.example_inputs = pieces[0]
    found = stages_of_build(schedule, arguments, target, plan)
    assert found is not None
    staged, ranks = found
    schedule.tree.tensors.placement = placed(correspondence, staged.partition, ranks)
    if request.loss is None:
        loss = staged.partition.output.loss
        staged = needing(schedule, staged, (loss,) if loss is not None else ())
    return Pipeline(staged, ranks, pieces, target.dialect, plan)


def train_stages(
    schedule: Schedule,
    pipeline: Pipeline,
    pieces: list[Any],
    request: Request,
    mode: FakeTensorMode,
    trackers: Trackers,
    values: Values,
) -> None:
    """Run the steps as the pipeline engine of target ``"torch"`` does; as :func:`slapo_core.estimation.step.train`.

    Args:
        schedule: its model has tensors without memory.
        pipeline: of it, from before.
        pieces: its micro-batches, without memory.
        request: what is asked.
        mode: of the tensors.
        trackers: told of every operation.
        values: who runs the operations.
    """
    assert schedule.mesh is not None
    place, memory, group = trackers.place, trackers.memory, schedule.mesh.group("pp")
    assert group is not None
    correspondence, _ = Correspondence.of(schedule)
    here = [live.tensor for live in correspondence.live() if live.is_local]
    rank = schedule.mesh.rank("pp")
    own = [stage for stage in pipeline.staged.partition.stages if pipeline.ranks[stage.index] == rank]
    parameters = [one for one in here if isinstance(one, nn.Parameter)]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    call = LossCall(schedule.model, request.loss)
    inputs = [_inputs(schedule.model, piece, request) for piece in pieces]
    assemble = pipeline.staged.partition.output.assemble

    def loss(number: int, made: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return call.loss_of(assemble(made), pieces[number])

    def at(what: str) -> None:
        place.begin("backward" if " in the backward " in what else "forward")

    with mode:
        optimizer = optimizer_of(parameters, request) if parameters else None
        runner = pipeline.dialect.stage_runner(
            pipeline.plan,
            pipeline.staged,
            pipeline.ranks,
            rank,
            group=group,
            device=torch.device("cpu"),
        )
        memory.hold(parameters, "parameters")
        memory.hold((one for one in here if not isinstance(one, nn.Parameter)), "buffers")
        for stage in own:
            memory.hold(stage.module.buffers(), "buffers")
        memory.hold((leaf for leaf in tree_leaves(pieces) if isinstance(leaf, torch.Tensor)), "inputs")
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(lambda p: memory.hold([p.grad], "gradients"))
        tied = TiedGradients(correspondence)
        with place.watching(), Watch(trackers.observers(), values):
            for _ in range(2):
                trackers.begin_step()
                place.forget()
                place.begin("forward")
                for parameter in trained:
                    parameter.grad = None
                work = runner.run(inputs, loss, backward=True, at=at)
                place.begin("backward")
                message = torch.zeros(3, dtype=torch.float64)  # the loss, for all ranks of the replica
                group.allreduce([message]).wait()
                del work
                if schedule.mesh.size("dp") > 1:
                    pipeline.dialect.average_gradients(pipeline.plan, trained, schedule.mesh.group("dp"))
                tied.sum_all()
                place.begin("optimizer")
                if optimizer is not None:
                    optimizer.step()
                    memory.hold(state_of(optimizer), "optimizer")


def _inputs(model: nn.Module, piece: Any, request: Request) -> dict[str, Any]:
    return bound_batch(model, piece, for_loss=request.loss is not None)
