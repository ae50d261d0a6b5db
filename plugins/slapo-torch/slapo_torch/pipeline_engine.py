"""The engine of target ``"torch"`` for pipelines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo_core import BuildError, StepResult
from slapo_runtime.engine import PipelineSteps
from slapo_runtime.stages.runner import StageCache, step_seed
from slapo_torch.data_options import data_ranks
from slapo_torch.fully_shard import called_paths, units_of_stages
from slapo_torch.precise_engine import PreciseEngine
from slapo_torch.replica_gradients import averaging
from slapo_torch.running_stage import PipelineRunner
from slapo_torch.schedules import schedule_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from slapo_core import Plan, Schedule
    from slapo_runtime.context import BuildContext
    from slapo_runtime.stages import StagedModel
    from slapo_runtime.stages.partition import Partition
    from slapo_torch.precision import ModelPrecision
    from slapo_torch.running_stage import PipelineWork
    from slapo_torch.sharded_data import ShardedStages


class PipelineRuntime:
    """The parts of a training step of a pipeline of target ``"torch"``.

    A manual step, with the gradients of several batches::

        for batch in batches:
            loss = engine.torch.forward_backward(batch)
        engine.torch.clip_gradients()
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    Args:
        engine: of the pipeline.
        context: from ``build``.
    """

    def __init__(self, engine: PipelineEngine, context: BuildContext) -> None:
        self._engine, self._context = engine, context

    def forward_backward(self, batch: Any) -> Tensor:
        """Run all micro-batches forward and backward: a collective.

        It adds the gradients, averaged over replicas and summed over ties, and returns the mean loss.
        """
        return self._engine._forward_backward(batch)

    def clip_gradients(self) -> Tensor | None:
        """Clip all gradients: a collective; return the norm before, or None."""
        return self._context.clip_gradients()

    def sent_bytes(self) -> dict[int, tuple[int, int]]:
        """Return the bytes sent by each stage of this rank, forward and backward."""
        return {stage: (forward, back) for stage, (forward, back) in self._engine._sent_bytes.items()}


def gather_output(
    partition: Partition,
    full: Partition,
    work: PipelineWork,
    ranks: Sequence[int],
    rank: int,
    group: Any,
    *,
    device: torch.device,
    count: int,
) -> tuple[Any, str]:
    """Gather the output for the full batch: a collective over the stages.

    Args:
        partition: for a micro-batch.
        full: for the full batch, with the shapes of the output values.
        work: the outputs of this rank's stages.
        ranks: the rank along ``pp`` of each stage.
        rank: this rank.
        group: of these ranks.
        device: of the stages.
        count: of micro-batches.

    Returns:
        the output, and a problem that prevents it, the same on every rank; "" without one.
    """
    values, problem = {}, ""
    for name in partition.output.names:
        value, owner = partition.values[name], ranks[partition.values[name].producer]
        shape = full.values[name].shape
        axis = _axis(value.shape, shape, count)
        parts = [work.outputs[name][number] for number in range(count)] if rank == owner else []
        fits = axis is not None or shape == value.shape
        if fits and axis is None and value.shape and count > 1:  # a tensor that is not split
            alike = torch.tensor([all(torch.equal(part, parts[0]) for part in parts)], device=device)
            _broadcast(alike, owner, group)
            fits = bool(alike)
        if not fits:
            problem = problem or (
                f"output '{name}' has shape {value.shape} for a micro-batch and {shape} for the full batch: the "
                "outputs of the micro-batches cannot be combined"
            )
            continue
        joined = _joined(parts, axis).contiguous() if parts else torch.empty(shape, dtype=value.dtype, device=device)
        _broadcast(joined, owner, group)
        values[name] = joined
    return (None, problem) if problem else (partition.output.assemble(values), "")


def borders_of_stages(schedule: Schedule, partition: Partition, precision: ModelPrecision) -> Iterable[str]:
    """Return the paths of the modules of all ranks whose inputs are cast, for :meth:`ModelPrecision.install`."""
    everywhere = called_paths(schedule.model, [stage.module for stage in partition.stages])
    return units_of_stages(schedule, everywhere) if precision.gathers else ()


def _joined(parts: list[torch.Tensor], axis: int | None) -> torch.Tensor:
    if axis is not None:
        return torch.cat(parts, axis)
    if parts[0].dim() == 0 and parts[0].is_floating_point():
        return torch.stack(parts).mean(0)  # a loss
    return parts[0]


def _axis(shape: tuple[int, ...], full: tuple[int, ...], count: int) -> int | None:
    """Return the axis along which micro-batches are concatenated; None if there is none."""
    if len(shape) != len(full):
        return None
    axes = [axis for axis, sizes in enumerate(zip(shape, full, strict=True)) if sizes[0] != sizes[1]]
    return axes[0] if len(axes) == 1 and shape[axes[0]] * count == full[axes[0]] else None


def _broadcast(tensor: torch.Tensor, root: int, group: Any) -> None:
    """Broadcast a tensor of any type, as bytes."""
    if tensor.numel():
        dist.broadcast(tensor.reshape(-1).view(torch.uint8), group=group, group_src=root)


class PipelineEngine(PipelineSteps, PreciseEngine):
    """The implementation of :class:`slapo_core.dialect.Engine` by torch.distributed.pipelining.

    Every rank gets the full batch of its replica, and returns the replica's loss. A failed step closes the engine.

    Args:
        plan: the plan of the build; ``plan.config`` holds the options of the pipeline.
        context: from ``build``.
    """

    def __init__(self, plan: Plan, context: BuildContext) -> None:
        mesh = context.schedule.mesh
        assert mesh is not None
        if context.accumulate > 1:
            raise BuildError(
                f"a pipeline accumulates gradients over its micro-batches (got accumulate={context.accumulate})",
                hint=f"microbatches={context.accumulate * plan.config['microbatches']}, and no accumulate",
            )
        self.plan, self._context, self._mesh = plan, context, mesh
        self._state = context.state
        self._ranks, self._rank = context.stage_ranks, mesh.rank("pp")
        self._count: int = plan.config["microbatches"]
        self._axes: Mapping[str, int | None] = plan.config["batch_axes"]
        self._part: nn.Module | None = None
        is_sharded = self._materialize(plan, context)
        self.optimizer = context.make_optimizer(partitioned=is_sharded and data_ranks(mesh) > 1, gathers=True)
        self._sharded: ShardedStages | None = None
        if is_sharded:
            self._sharded = self._shard()
        else:
            self._precision.install(())
        self.lr_scheduler = context.make_lr_scheduler(self.optimizer)
        here = [live for live in self._state.tensors() if live.is_local]
        self._parameters = [live.tensor for live in here if live.is_parameter]
        self._device = context.device or next((live.tensor.device for live in here), torch.device("cpu"))
        self._schedule = schedule_of(plan.config, len(self._ranks), mesh.size("pp"))
        self._cache = StageCache(context, self._count, self._axes, "", self._runner, prepare=self._precision.prepare)
        self._sent_bytes: dict[int, list[int]] = {}  # to other ranks, forward and backward, by stage

    @property
    def module(self) -> nn.Module:
        """The stages of this rank, with their modules at the reference paths."""
        if self._part is None:
            prepare = self._precision.prepare
            example = self._context.staged_example(self._count, axes=self._axes, prepare=prepare)
            self._part = self._context.part(example.staged.partition)
        return self._part

    @property
    def torch(self) -> PipelineRuntime:
        """The parts of a training step, for manual loops.

        Raises:
            BuildError: the engine is closed.
        """
        self._require_open()
        return PipelineRuntime(self, self._context)

    def _shard(self) -> ShardedStages:
        """Put shards into the stages of this rank and into the optimizer; everything that can fail came before."""
        from slapo_torch.sharded_data import shard_stages

        schedule, precision = self._context.schedule, self._precision
        prepare = precision.prepare_stored
        partition = self._context.staged_example(self._count, axes=self._axes, prepare=prepare).staged.partition
        own = [stage.module for stage in partition.stages if self._ranks[stage.index] == self._rank]
        sharded = shard_stages(schedule, own, precision, self.plan.config)
        sharded.take_over(self.optimizer)
        self._state.tensors()  # shards take over the layouts of the parameters in whose place they are
        precision.install(borders_of_stages(schedule, partition, precision))
        self._part = self._context.part(partition)
        self._context.forget_stages()  # they hold the full parameters
        return sharded

    # -- steps; documented in slapo_core.dialect.Engine ---------------------------------------------------------

    def train_step(self, batch: Any) -> StepResult:
        self._require_open()
        if self.optimizer is None:
            raise self._without_optimizer()
        loss = self._forward_backward(batch, zero=self.optimizer)
        with self._closing(lambda: self._at):
            norm = self._update(self._stand)
        self.steps += 1
        return self._context.step_result(loss, None, norm)

    def eval_step(self, batch: Any, *, gather_outputs: bool = False) -> StepResult:
        """Run the forwards of all micro-batches.

        Args:
            batch: as for ``train_step``.
            gather_outputs: return the output for the full batch, on every rank.
        """
        self._require_open()
        with self._context.evaluating(batch), self._gathered():
            cut, runner = self._cache.of(batch, training=False)
            full = self._full(batch, runner.partition) if gather_outputs else runner.partition
            with self._closing(lambda: self._at):
                work = runner.run(cut.inputs, cut.loss, backward=False, keep_outputs=gather_outputs, at=self._stand)
                loss, output, problem = self._loss(runner, work), None, ""
                if gather_outputs:
                    self._at = "gathering the output"
                    output, problem = gather_output(
                        runner.partition,
                        full,
                        work,
                        self._ranks,
                        self._rank,
                        self._mesh.group("pp"),
                        device=self._device,
                        count=self._count,
                    )
        if problem:
            raise BuildError(problem, hint="eval_step(batch) without gather_outputs")
        return StepResult(loss, output)

    def _forward_backward(self, batch: Any, *, zero: Optimizer | None = None) -> Tensor:
        """Run all micro-batches forward and backward; return the mean loss.

        Args:
            batch: as for ``train_step``.
            zero: the optimizer whose gradients are reset first; None adds to the present ones.
        """
        self._require_open()
        self._refuse_without_gradients()
        with self._context.training(batch), self._gathered():
            cut, runner = self._cache.of(batch, training=True)
            with self._closing(lambda: self._at):
                if zero is not None:
                    zero.zero_grad(set_to_none=True)
                earlier = [(one, one.grad) for one in self._trained() if one.grad is not None]
                for parameter, _ in earlier:
                    parameter.grad = None  # averaged already
                begin, finish = averaging(
                    runner,
                    self._trained(),
                    self._mesh.group("dp") if self._sharded is None else None,
                    bucket_bytes=self.plan.config["bucket_cap_mb"] << 20,
                )
                scale = None if self.scaler is None else self.scaler.scaled_one()
                with step_seed(self._device) as seed, self._watched():
                    work = runner.run(
                        cut.inputs,
                        cut.loss,
                        backward=True,
                        seed=seed,
                        at=self._stand,
                        stage_is_over=begin,
                        scale=scale,
                    )
                loss = self._loss(runner, work)
                self._at = "summing gradients"
                finish()
                if self._sharded is not None:
                    self._sharded.reduce_gradients()
        with self._closing(lambda: self._at):  # shards are in their places again
            self._context.sum_tied_gradients()
            for parameter, gradient in earlier:
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        return loss

    @contextlib.contextmanager
    def _gathered(self) -> Iterator[None]:
        """Have full parameters for the passes of a step, in the types of the forward."""
        if self._sharded is None:
            yield
            return
        with self._sharded.gathered(), self._precision.placeholders():
            yield

    def _runner(self, staged: StagedModel, training: bool) -> PipelineRunner:
        """Make the runner of this rank's stages for one input signature."""
        runner = PipelineRunner(
            staged.partition,
            staged.liveness,
            self._schedule,
            self._ranks,
            self._rank,
            group=self._mesh.group("pp"),
            device=self._device,
            count=self._count,
        )
        for stage in runner.stages:
            stage.sent_bytes = self._sent_bytes.setdefault(stage.stage_index, [0, 0])
        return runner

    def _full(self, batch: Any, partition: Partition) -> Partition:
        """Return the stages for the uncut batch, with the shapes of the full output."""
        full = self._context.staged(batch, 1, training=False, axes=self._axes).staged.partition
        if full.output.names != partition.output.names:
            raise BuildError(
                "the output of the full batch has other tensors than the output of a micro-batch: the outputs of the "
                "micro-batches cannot be combined",
                hint="eval_step(batch) without gather_outputs",
            )
        return full

    def _trained(self) -> list[Tensor]:
        return [parameter for parameter in self._parameters if parameter.requires_grad]

    def _loss(self, runner: PipelineRunner, work: PipelineWork) -> Tensor:
        """Return the mean loss on every rank, and advance a used RNG."""
        is_last = self._ranks[-1] == self._rank
        own = [work.losses[number] for number in range(self._count)] if is_last else []
        return self._exchange_loss(runner, own, drew=work.drew, device=self._device)

    # -- the end ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release the optimizer and the stages; the model and its state stay."""
        if self._reason is None:
            self._reason = ""
        self._cache.close()
        self.optimizer = self.lr_scheduler = None

    def _require_open(self) -> None:
        if self._reason is not None:
            raise self._closed(self._reason)
