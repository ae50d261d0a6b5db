"""Training steps of one simulated rank: of a whole model, of replicas, of its pipeline stages."""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core.errors import ArgumentError, BuildError, EstimateError
from slapo_estimate.private import (
    FakeTensorMode,
    backwards_through,
    bucket_assignment,
    runtimes_without_memory,
    tree_leaves,
)
from slapo_estimate.trackers import Watch
from slapo_estimate.values import Values, seen_as_plain
from slapo_runtime.batches import bound_batch, micro_batches
from slapo_runtime.build import UserArguments, simulated_step, stages_of_build
from slapo_runtime.build_target import BuildTarget
from slapo_runtime.correspondence import Correspondence, placement_of
from slapo_runtime.gradients import TiedGradients
from slapo_runtime.losses import LossCall
from slapo_runtime.ranks.world import simulated_rank
from slapo_runtime.stages import StagedModel, needing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from slapo_core import Schedule
    from slapo_core.dialect import Plan
    from slapo_estimate.attribution import Place
    from slapo_estimate.rank_process import Request, Trackers
    from slapo_estimate.results import RankEstimate
    from slapo_estimate.trackers import MemoryTracker

_LIMIT = 25 * 2**20  # bytes of a bucket: the default of option `bucket_cap_mb`
_BROADCAST = 250 * 2**20  # bytes of buffers that are sent at once


@dataclass
class _Bucket:
    """Gradients that are exchanged together.

    Args:
        gradients: all of them, one after the other.
        views: of each parameter's gradient.
        missing: parameters whose gradients have not come in this step.
    """

    gradients: torch.Tensor
    views: dict[nn.Parameter, torch.Tensor]
    missing: set[nn.Parameter] = field(default_factory=set)


class Replicas:
    """Keeps gradients in buckets, and exchanges each bucket when its last gradient has come.

    As ``torch.nn.parallel.DistributedDataParallel(gradient_as_bucket_view=True, bucket_cap_mb=25)`` does: one bucket in
    the first step; from the second on buckets of 25 MiB in the order in which gradients came in the first, into which
    gradients are moved before its forward. They hold memory from the start, and gradients are views of them; while
    nothing is exchanged, gradients have memory of their own, too. Buffers are sent from the first replica before a
    step's first forward. The class itself reads tensors in C++, which those without memory do not bear.

    Args:
        model: whose parameters get hooks.
        group: of the replicas.
        hold: called with the memory of gradients.

    Source: ``torch/nn/parallel/distributed.py`` and ``torch/csrc/distributed/c10d/reducer.cpp``.
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup, hold: Callable[[Iterable[torch.Tensor]], None]
    ) -> None:
        self._group, self._hold = group, hold
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._buffers = list(model.buffers())
        self._of: dict[nn.Parameter, _Bucket] = {}
        self._waiting: list[_Bucket] = []  # not exchanged yet in this step, in their order
        self._came: list[nn.Parameter] = []
        self._is_rebuilt = False
        self._synchronizes = self._did_synchronize = True
        self._fill(self._parameters, sys.maxsize)
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._ready)

    @property
    def without_gradients(self) -> list[nn.Parameter]:
        """Trained parameters without a gradient in the first step; torch refuses the next step."""
        came = set(self._came)
        return [parameter for parameter in self._parameters if parameter not in came]

    def before_forward(self, *, synchronize: bool) -> None:
        """Prepare a micro-batch; ``synchronize`` for the last one of a step."""
        if not self._is_rebuilt and self._came:
            self._fill(self._came, _LIMIT)
            self._is_rebuilt = True
        if self._did_synchronize and self._buffers:
            self._send_buffers()
        self._synchronizes = self._did_synchronize = synchronize
        if synchronize:
            self._waiting = list({id(bucket): bucket for bucket in self._of.values()}.values())
            for bucket in self._waiting:
                bucket.missing.update(bucket.views)

    def _fill(self, parameters: Sequence[nn.Parameter], limit: int) -> None:
        self._of.clear()
        for positions in bucket_assignment(parameters, limit):
            chosen = [parameters[position] for position in positions]
            flat = torch.empty(
                sum(parameter.numel() for parameter in chosen), dtype=chosen[0].dtype, device=chosen[0].device
            )
            self._hold([flat])
            parts = flat.split([parameter.numel() for parameter in chosen])
            views = {parameter: part.view(parameter.shape) for parameter, part in zip(chosen, parts, strict=True)}
            bucket = _Bucket(flat, views)
            self._of.update(dict.fromkeys(chosen, bucket))
            for parameter in chosen:  # gradients move, bucket by bucket; old buckets go with the last of theirs
                if parameter.grad is not None:
                    views[parameter].copy_(parameter.grad)
                    parameter.grad = views[parameter]

    def _ready(self, parameter: nn.Parameter) -> None:
        if not self._synchronizes:
            return
        bucket, gradient = self._of[parameter], parameter.grad
        assert gradient is not None
        bucket.views[parameter].copy_(gradient)  # divided by the number of replicas on the way
        parameter.grad = bucket.views[parameter]
        if not self._is_rebuilt:
            self._came.append(parameter)
        bucket.missing.discard(parameter)
        while self._waiting and not self._waiting[0].missing:  # all replicas exchange buckets in one order
            dist.all_reduce(self._waiting.pop(0).gradients, group=self._group, async_op=True)

    def _send_buffers(self) -> None:
        for positions in sorted(bucket_assignment(self._buffers, _BROADCAST)):
            together = torch.cat([self._buffers[position].detach().reshape(-1) for position in positions])
            dist.broadcast(together, group=self._group, group_src=0)
            start = 0
            for buffer in (self._buffers[position] for position in positions):
                buffer.detach().copy_(together[start : start + buffer.numel()].view(buffer.shape))
                start += buffer.numel()


def replicas_of(model: nn.Module, mesh: Any, hold: Callable[[Iterable[torch.Tensor]], None]) -> Replicas | None:
    """Make the replicas of a mesh (``dp``); None where there is one, or nothing is trained."""
    if mesh is None or mesh.size("dp") == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return None
    return Replicas(model, mesh.group("dp"), hold)


def train(
    schedule: Schedule,
    batches: list[Any],
    request: Request,
    mode: FakeTensorMode,
    trackers: Trackers,
    values: Values,
) -> None:
    """Run two training steps as target ``"torch"`` does; ``trackers`` keep the costs of the second.

    Args:
        schedule: of a model with tensors without memory, in training mode.
        batches: the batch's micro-batches, without memory.
        request: the arguments of this rank.
        mode: of the tensors.
        trackers: observe every operation.
        values: runs the operations.
    """
    model = schedule.model
    place, memory = trackers.place, trackers.memory
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise EstimateError(
            "no parameter of the model requires a gradient: nothing to train",
            hint="model.requires_grad_(True), or set it on the parameters that are to be trained",
        )
    with mode:
        optimizer = optimizer_of(list(model.parameters()), request)
        hold_all(model, batches, trackers)
        replicas = replicas_of(model, schedule.mesh, lambda tensors: memory.hold(tensors, "gradients"))
        with place.watching(), memory.watching(), seen_as_plain(), Watch(trackers.observers(), values):
            for _ in range(2):
                trackers.begin_step()
                place.forget()
                _step(model, batches, request, optimizer, trackers, replicas)
                if optimizer is not None:
                    memory.hold(state_of(optimizer), "optimizer")
    if replicas is not None:
        missing = set(replicas.without_gradients)
        trackers.without_gradients.extend(name for name, each in model.named_parameters() if each in missing)


def train_by_target(
    schedule: Schedule,
    batch: Any,
    request: Request,
    mode: FakeTensorMode,
    trackers: Trackers,
    values: Values,
) -> None:
    """Run two training steps of another target than ``"torch"``, by its own engine; arguments as of :func:`train`.

    Args:
        batch: the whole one, without memory.

    Raises:
        BuildError: as :func:`slapo_core.build` would, or the target does not know what a step needs.
    """
    model = schedule.model
    place, memory = trackers.place, trackers.memory
    values.otherwise = lambda: 0.0  # norms, and whether a number is infinite
    with mode:
        hold_tensors(model, [batch], memory)
        with (
            runtimes_without_memory(),
            place.watching(),
            _phases(place, model),
            memory.watching(),
            seen_as_plain(),
            simulated_rank(),
            Watch(trackers.observers(), values),
        ):
            arguments = {"optimizer": request.optimizer, "loss": request.loss, "accumulate": request.accumulate}
            place.begin("optimizer")
            step = simulated_step(schedule, request.target, **arguments, **request.config)
            memory.settle()
            hold_all(model, [batch], trackers)
            memory.forget_peak()  # the whole model is there before it is partitioned: a build makes it tensor by tensor
            for _ in range(2):
                gc.collect()  # what only cycles of the runtime's objects hold is not its state
                memory.settle()
                trackers.begin_step()
                place.forget()
                step(batch)


@contextmanager
def _phases(place: Place, model: nn.Module) -> Iterator[None]:
    """Tell the phases of an engine's step: forward from the model's call on, backward, and then the optimizer's."""

    def backward(run: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        place.begin("backward")
        try:
            run(*args, **kwargs)
        finally:
            place.begin("optimizer")

    handle = model.register_forward_pre_hook(lambda *_: place.begin("forward"))
    try:
        with backwards_through(backward):
            yield
    finally:
        handle.remove()


def hold_tensors(model: torch.nn.Module, batches: list[Any], memory: MemoryTracker) -> None:
    """Count the tensors of the model and of the batch as what they are."""
    memory.hold(model.parameters(), "parameters")
    memory.hold(model.buffers(), "buffers")
    memory.hold((leaf for leaf in tree_leaves(batches) if isinstance(leaf, torch.Tensor)), "inputs")


def hold_all(model: torch.nn.Module, batches: list[Any], trackers: Trackers) -> None:
    """Count the tensors before the first step, and every gradient once it exists."""
    memory = trackers.memory
    hold_tensors(model, batches, memory)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: memory.hold([p.grad], "gradients"))


def _step(
    model: torch.nn.Module,
    batches: list[Any],
    request: Request,
    optimizer: torch.optim.Optimizer | None,
    trackers: Trackers,
    replicas: Replicas | None,
) -> None:
    """Run a step as ``slapo_torch/engine.py`` does: in its order, and holding the same tensors."""
    place = trackers.place
    compute_loss = LossCall(model, request.loss)
    losses, output = [], None
    for number, batch in enumerate(batches):
        place.begin("forward")
        if replicas is not None:
            replicas.before_forward(synchronize=number == len(batches) - 1)
        loss, output = compute_loss(batch)
        if number == 0:
            for parameter in model.parameters():
                parameter.grad = None
        place.begin("backward")
        (loss / len(batches) if len(batches) > 1 else loss).backward()
        losses.append(loss.detach())
    place.begin("optimizer")
    if optimizer is not None:
        optimizer.step()
    del loss, output, losses


def optimizer_of(parameters: list[torch.nn.Parameter], request: Request) -> torch.optim.Optimizer | None:
    """Call the request's optimizer factory."""
    if request.optimizer is None:
        return None
    optimizer = request.optimizer(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            f"the optimizer factory must return a torch.optim.Optimizer (got {type(optimizer).__name__})",
            hint="estimate(sch, batch, optimizer=functools.partial(torch.optim.AdamW, lr=1e-4))",
        )
    return optimizer


def state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """List the tensors of an optimizer's state."""
    return [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True)
class Pipeline:
    """A model cut into stages, while its tensors have memory.

    Args:
        staged: the stages, for one micro-batch.
        ranks: the rank along ``pp`` of each stage.
        batches: the micro-batches of the batch.
        dialect: of target ``"torch"``.
        plan: its own.
    """

    staged: StagedModel
    ranks: tuple[int, ...]
    batches: list[Any]
    dialect: Any
    plan: Plan

    @property
    def share(self) -> float:
        """Share of another rank's time that a rank waits while the pipeline fills and drains.

        With ``v`` stages a rank and ``m`` micro-batches, it waits for one of ``v * m`` stage passes of each other rank.
        """
        passes = len(self.ranks) // len(set(self.ranks)) * len(self.batches)
        return 1 / passes


def with_waiting(kinds: Sequence[RankEstimate], share: float) -> tuple[RankEstimate, ...]:
    """Add the time that ranks wait for other stages.

    Args:
        kinds: one for each place along ``pp``; without a device they have no time.
        share: see :attr:`Pipeline.share`; 0 where there is no pipeline.
    """
    busy = sum(kind.time or 0.0 for kind in kinds)
    return tuple(
        kind if kind.time is None else replace(kind, time=kind.time + share * (busy - kind.time)) for kind in kinds
    )


def pipeline_of(schedule: Schedule, request: Request) -> Pipeline | None:
    """Cut the model of a schedule; None where it has one rank along ``pp``.

    Raises:
        ArgumentError: there is one rank, and options of a pipeline.
        BuildError: as :func:`slapo_core.build` would: stages and mesh, the options, or the batch do not go together.
        TraceError: the model cannot be cut there.
    """
    pp = schedule.mesh.size("pp") if schedule.mesh is not None else 1
    if pp == 1:
        others = [name for name in request.config if name != "batch_axes"]
        if others:
            raise ArgumentError(
                f"estimate takes no option {', '.join(map(repr, others))} where there is one rank along 'pp'",
                hint='mesh={"pp": 4}, microbatches=8 for a pipeline; accumulate=8 for micro-batches on one rank',
            )
        return None
    arguments = UserArguments(optimizer=request.optimizer, loss=request.loss, accumulate=request.accumulate)
    target = BuildTarget("torch", schedule)
    plan = target.plan(schedule, request.config, arguments.for_plan())
    count, axes = plan.config["microbatches"], plan.config["batch_axes"]
    if request.accumulate > 1:
        raise BuildError(
            f"a pipeline accumulates gradients over its micro-batches (got accumulate={request.accumulate})",
            hint=f"microbatches={request.accumulate * count}, and no accumulate",
        )
    correspondence, _ = Correspondence.of(schedule)
    batches = micro_batches(request.batch, count, option="microbatches", axes=axes)
    schedule.example_inputs = batches[0]
    found = stages_of_build(schedule, arguments, target, plan)
    assert found is not None
    staged, ranks = found
    schedule._core.tree.tensors.placement = placement_of(correspondence, staged.partition, ranks)
    if request.loss is None:
        loss = staged.partition.output.loss
        staged = needing(schedule, staged, (loss,) if loss is not None else ())
    return Pipeline(staged, ranks, batches, target.dialect, plan)


def train_stages(
    schedule: Schedule,
    pipeline: Pipeline,
    batches: list[Any],
    request: Request,
    mode: FakeTensorMode,
    trackers: Trackers,
    values: Values,
) -> None:
    """Run the steps as the pipeline engine of target ``"torch"`` does; arguments as of :func:`train`.

    Args:
        schedule: its model has tensors without memory.
        pipeline: of it, from before.
        batches: its micro-batches, without memory.
        request: the arguments of this rank.
        mode: of the tensors.
        trackers: observe every operation.
        values: runs the operations.
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
    inputs = [_inputs(schedule.model, batch, request) for batch in batches]
    assemble = pipeline.staged.partition.output.assemble

    def loss(number: int, made: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return call.loss_of(assemble(made), batches[number])

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
        memory.hold((leaf for leaf in tree_leaves(batches) if isinstance(leaf, torch.Tensor)), "inputs")
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
                begin, finish = pipeline.dialect.averaging(pipeline.plan, runner, trained, schedule.mesh.group("dp"))
                work = runner.run(inputs, loss, backward=True, at=at, stage_is_over=begin)
                place.begin("backward")
                message = torch.zeros(3, dtype=torch.float64)  # the loss, for all ranks of the replica
                group.allreduce([message]).wait()
                del work
                finish()
                tied.sum_all()
                place.begin("optimizer")
                if optimizer is not None:
                    optimizer.step()
                    memory.hold(state_of(optimizer), "optimizer")


def _inputs(model: nn.Module, batch: Any, request: Request) -> dict[str, Any]:
    return bound_batch(model, batch, for_loss=request.loss is not None)
