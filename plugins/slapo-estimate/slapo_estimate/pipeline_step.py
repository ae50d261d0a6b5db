"""Training steps of one simulated pipeline rank: cut the model, and run its stages."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.errors import BuildError, EstimateError
from slapo_core.internals import Internals
from slapo_estimate.trackers import ObserverMode
from slapo_estimate.training_step import Gathered, hold_gradients, hold_optimizer, hold_tensors, optimizer_of
from slapo_runtime.batches import bound_batch, in_mode, micro_batches
from slapo_runtime.build import UserArguments, stages_of_build
from slapo_runtime.build_target import BuildTarget
from slapo_runtime.correspondence import Correspondence, placement_of
from slapo_runtime.gradients import GradientClipper, TiedGradients
from slapo_runtime.losses import LossCall
from slapo_runtime.ranks.world import simulated_rank
from slapo_runtime.receipts.attribution import StepPlaces
from slapo_runtime.stages import StagedModel, ask, needing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from slapo_core import Schedule
    from slapo_core.dialect import Plan
    from slapo_estimate.private import FakeTensorMode
    from slapo_estimate.results import RankEstimate
    from slapo_estimate.simulation import Request, Trackers
    from slapo_estimate.values import KnownValues


@dataclass(frozen=True)
class Pipeline:
    """A model cut into stages, before its tensors are replaced by fake ones.

    Args:
        staged: the stages, for one micro-batch.
        ranks: the rank along ``pp`` of each stage.
        batches: the micro-batches.
        dialect: the dialect of target ``"torch"``.
        plan: the plan of the dialect.
        precision: the types of the stages; see ``TorchDialect.stage_precision``.
        max_grad_norm: as for :func:`slapo_core.build`.
    """

    staged: StagedModel
    ranks: tuple[int, ...]
    batches: list[Any]
    dialect: Any
    plan: Plan
    precision: Any
    max_grad_norm: float | None = None

    @property
    def share(self) -> float:
        """Share of another rank's time that a rank waits while the pipeline fills and drains.

        With ``v`` stages per rank and ``m`` micro-batches, a rank waits for one of ``v * m`` stage passes of each other
        rank.
        """
        passes = len(self.ranks) // len(set(self.ranks)) * len(self.batches)
        return 1 / passes


def with_waiting(kinds: Sequence[RankEstimate], share: float) -> tuple[RankEstimate, ...]:
    """Add the time that ranks wait for other stages.

    Args:
        kinds: one estimate for each rank along ``pp``; without a device they have no time.
        share: see :attr:`Pipeline.share`; 0 without a pipeline.
    """
    busy = sum(kind.time or 0.0 for kind in kinds)
    return tuple(
        kind if kind.time is None else replace(kind, time=kind.time + share * (busy - kind.time)) for kind in kinds
    )


def pipeline_of(schedule: Schedule, request: Request) -> Pipeline:
    """Cut the model of a schedule with several ranks along ``pp``.

    Raises:
        BuildError: see :func:`slapo_core.build`: stages, mesh, options or batch do not fit each other.
        EstimateError: ``precision`` is ``"fp16-mixed"``.
        TraceError: the model cannot be cut there.
    """
    arguments = UserArguments(
        optimizer=request.optimizer,
        loss=request.loss,
        accumulate=request.accumulate,
        max_grad_norm=request.config.get("max_grad_norm"),
    )
    arguments.check()
    target = BuildTarget("torch", schedule)
    config = {name: value for name, value in request.config.items() if name != "max_grad_norm"}
    plan = target.plan(schedule, config, arguments.for_plan())
    if plan.config["precision"] == "fp16-mixed":
        raise EstimateError(
            "what a pipeline keeps and sends with precision='fp16-mixed' is not known",
            hint='precision="bf16-mixed", which has no GradScaler; or mesh={"pp": 1, ...} for the model in one stage',
        )
    count, axes = plan.config["microbatches"], plan.config["batch_axes"]
    if request.accumulate > 1:
        raise BuildError(
            f"accumulate must be 1 for a pipeline, which has microbatches= (got accumulate={request.accumulate})",
            hint=f"microbatches={request.accumulate * count}, without accumulate=",
        )
    correspondence, _ = Correspondence.of(schedule)
    batches = micro_batches(request.batch, count, option="microbatches", axes=axes)
    schedule.example_inputs = batches[0]
    found = stages_of_build(schedule, arguments, target, plan)
    assert found is not None
    staged, ranks = found
    Internals(schedule).tree.tensors.placement = placement_of(correspondence, staged.partition, ranks)
    dialect: Any = target.dialect
    precision = dialect.stage_precision(plan, schedule, staged.partition, device=torch.device("cpu"))
    if plan.config["precision"] is not None:
        staged = _cut_in(precision, schedule, request)
    if request.loss is None:
        loss = staged.partition.output.loss
        staged = needing(schedule, staged, (loss,) if loss is not None else ())
    return Pipeline(staged, ranks, batches, dialect, plan, precision, arguments.max_grad_norm)


def _cut_in(precision: Any, schedule: Schedule, request: Request) -> StagedModel:
    """Store the parameters in a precision, and cut the model again with the types in which it computes."""
    for live in Correspondence.of(schedule)[0].live():
        dtype = precision.wanted(live) if live.is_parameter else None
        if dtype is not None:
            live.tensor.data = live.tensor.data.to(dtype)
    inputs = bound_batch(schedule.model, schedule.example_inputs, for_loss=request.loss is not None)
    with in_mode(list(schedule.model.modules()), training=True), precision.lowered():
        staged = ask(schedule, precision.prepare(inputs))
    assert staged is not None
    return staged


def train_stages(
    schedule: Schedule,
    pipeline: Pipeline,
    batches: list[Any],
    request: Request,
    mode: FakeTensorMode,
    trackers: Trackers,
    values: KnownValues,
) -> None:
    """Take the steps of target ``"torch"``'s pipeline engine; for the arguments see
    :func:`slapo_estimate.training_step.train`.

    Args:
        pipeline: the stages of the model.
    """
    assert schedule.mesh is not None
    position, memory, group = trackers.position, trackers.memory, schedule.mesh.group("pp")
    assert group is not None
    correspondence, _ = Correspondence.of(schedule)
    rank = schedule.mesh.rank("pp")
    own = [stage.module for stage in pipeline.staged.partition.stages if pipeline.ranks[stage.index] == rank]
    call = LossCall(schedule.model, request.loss)
    inputs = [bound_batch(schedule.model, batch, for_loss=request.loss is not None) for batch in batches]
    assemble = pipeline.staged.partition.output.assemble

    def here() -> list[torch.Tensor]:
        return [live.tensor for live in correspondence.live() if live.is_local]

    def parameters() -> list[nn.Parameter]:
        return [one for one in here() if isinstance(one, nn.Parameter)]

    def loss(number: int, made: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return call.loss_of(assemble(made), batches[number])

    def at(what: str) -> None:
        position.begin("backward" if " in the backward " in what else "forward")

    StepPlaces.of(schedule.model, Internals(schedule).entries()).attribute(schedule.model, position)
    with mode, memory.watching(), simulated_rank():
        optimizer = optimizer_of(parameters(), request) if parameters() else None
        sharded = pipeline.dialect.shard_stages(pipeline.plan, schedule, own, pipeline.precision)
        if sharded is not None:
            sharded.take_over(optimizer)
        runner = pipeline.dialect.stage_runner(
            pipeline.plan,
            pipeline.staged,
            pipeline.ranks,
            rank,
            group=group,
            device=torch.device("cpu"),
        )
        buffers = [one for one in here() if not isinstance(one, nn.Parameter)]
        buffers += [buffer for module in own for buffer in module.buffers()]
        trained = [parameter for parameter in parameters() if parameter.requires_grad]
        hold_tensors(parameters(), buffers, batches, memory)
        hold_gradients(trained, memory)
        tied = TiedGradients(correspondence)
        clips = pipeline.max_grad_norm
        clipper = None if clips is None else GradientClipper(correspondence, clips)
        hold_full = Gathered(memory)
        with position.watching(), ObserverMode(trackers.observers(), values):
            for _ in range(2):
                trackers.begin_step()
                position.begin("forward")
                with nullcontext() if sharded is None else sharded.gathered():
                    if sharded is not None:
                        hold_full(one for one in schedule.model.parameters() if not one.is_meta)
                    given = [pipeline.precision.prepare(dict(one)) for one in inputs]
                    for parameter in trained:
                        parameter.grad = None
                    begin, finish = pipeline.dialect.averaging(
                        pipeline.plan, runner, trained, schedule.mesh.group("dp") if sharded is None else None
                    )
                    work = runner.run(given, loss, backward=True, at=at, stage_is_over=begin)
                    position.begin("backward")
                    message = torch.zeros(3, dtype=torch.float64)  # the loss, for all ranks of the replica
                    group.allreduce([message]).wait()
                    del work
                    finish()
                    if sharded is not None:
                        sharded.reduce_gradients()
                del given
                tied.sum_all()
                position.begin("optimizer")
                if clipper is not None:
                    clipper.clip()
                if optimizer is not None:
                    optimizer.step()
                    hold_optimizer(optimizer, memory)
