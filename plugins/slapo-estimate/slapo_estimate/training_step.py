"""Training steps of one simulated rank: of a model, and of replicas."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from slapo_core.errors import ArgumentError, EstimateError
from slapo_core.internals import Internals
from slapo_estimate.private import (
    FakeTensorMode,
    bucket_assignment,
    replicated_through,
    runtimes_without_memory,
    tree_leaves,
)
from slapo_estimate.trackers import ObserverMode
from slapo_estimate.values import KnownValues, hide_fake_tensors
from slapo_runtime.build import simulated_step
from slapo_runtime.ranks.world import simulated_rank
from slapo_runtime.receipts.attribution import StepPlaces, phases_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from slapo_core import Schedule
    from slapo_estimate.results import Assumptions
    from slapo_estimate.simulation import Request, Trackers
    from slapo_runtime.receipts.memory import MemoryTracker

_KNOWN = {"bucket_cap_mb": None, "find_unused_parameters": False, "gradient_as_bucket_view": True}
"""Options of DistributedDataParallel that are followed; None for every value."""

_BROADCAST = 250 * 2**20  # bytes of buffers that are sent at once


@dataclass
class _Bucket:
    """Gradients of one exchange.

    Args:
        gradients: the flat gradients.
        views: the view of each parameter's gradient.
        missing: parameters whose gradients are not ready in this step.
    """

    gradients: torch.Tensor
    views: dict[nn.Parameter, torch.Tensor]
    missing: set[nn.Parameter] = field(default_factory=set)


class Replicas:
    """Allocate and exchange the buckets of ``DistributedDataParallel``, which cannot run on fake tensors.

    ``DistributedDataParallel(gradient_as_bucket_view=True)`` reads tensors in C++. It exchanges one bucket in the first
    step; from the second step on buckets of ``bucket_cap_mb`` in the order in which gradients became ready in the
    first, into which gradients move before the second forward. Buckets are allocated from the start, and gradients
    are their views; without an exchange gradients have memory of their own, too. The first replica sends its buffers
    before a step's first forward.

    Args:
        model: the model, whose parameters get hooks.
        group: the group of the replicas.
        options: of ``DistributedDataParallel``.
        hold: called with the memory of gradients.

    Raises:
        EstimateError: options with unknown effects on memory or messages.

    Source: ``torch/nn/parallel/distributed.py`` and ``torch/csrc/distributed/c10d/reducer.cpp``.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        options: Mapping[str, Any],
        hold: Callable[[Iterable[torch.Tensor]], None],
    ) -> None:
        for name, value in options.items():
            if name in _KNOWN and _KNOWN[name] in (None, value):
                continue
            raise EstimateError(
                f"what DistributedDataParallel keeps and sends with {name}={value!r} is not known",
                hint=f"leave out {name} for an estimate with its default",
            )
        self._group, self._hold, self._limit = group, hold, options["bucket_cap_mb"] * 2**20
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._buffers = list(model.buffers())
        self._of: dict[nn.Parameter, _Bucket] = {}
        self._waiting: list[_Bucket] = []  # not exchanged yet in this step, in order
        self._came: list[nn.Parameter] = []
        self._is_rebuilt = False
        self._synchronizes = self._did_synchronize = True
        self._fill(self._parameters, sys.maxsize)
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._ready)

    @property
    def without_gradients(self) -> list[nn.Parameter]:
        """Return trained parameters without a gradient in the first step; torch refuses the next step."""
        came = set(self._came)
        return [parameter for parameter in self._parameters if parameter not in came]

    def before_forward(self, synchronize: bool) -> None:
        """Prepare a micro-batch; ``synchronize`` at the last one of a step."""
        if not self._is_rebuilt and self._came:
            self._fill(self._came, self._limit)
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
            for parameter in chosen:  # gradients move bucket by bucket, which frees the old buckets
                if parameter.grad is not None:
                    views[parameter].copy_(parameter.grad)
                    parameter.grad = views[parameter]

    def _ready(self, parameter: nn.Parameter) -> None:
        if not self._synchronizes:
            return
        bucket, gradient = self._of[parameter], parameter.grad
        assert gradient is not None
        bucket.views[parameter].copy_(gradient)  # DDP also divides by the number of replicas here
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


def train(
    schedule: Schedule,
    batch: Any,
    request: Request,
    mode: FakeTensorMode,
    trackers: Trackers,
    values: KnownValues,
    assumptions: Assumptions,
) -> None:
    """Take two training steps by the target's engine; ``trackers`` keep the costs of the second.

    Args:
        schedule: schedule of a model with fake tensors, in training mode.
        batch: the full batch, with fake tensors.
        request: the arguments of this rank.
        mode: the mode of the fake tensors.
        trackers: observe each operation.
        values: runs the operations.
        assumptions: records how replicas exchange gradients.

    Raises:
        BuildError: see :func:`slapo_core.build`; or the target cannot simulate a step.
    """
    model, is_torch = schedule.model, request.target == "torch"
    position, memory = trackers.position, trackers.memory
    is_updating = False
    replicas: list[Replicas] = []
    places = StepPlaces.of(model, Internals(schedule).entries())  # a build drops them, and the tensors before the steps

    def replicate(module: nn.Module, group: dist.ProcessGroup, options: Mapping[str, Any]) -> Callable[[bool], None]:
        made = Replicas(module, group, options, lambda tensors: memory.hold(tensors, "gradients"))
        replicas.append(made)
        assumptions.replicas()

        def prepare(synchronize: bool) -> None:
            position.begin("forward")
            made.before_forward(synchronize)

        return prepare

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made = optimizer_of(parameters, request) or _Nothing(parameters)
        made.register_step_pre_hook(lambda *_: updates(True))
        made.register_step_post_hook(lambda *_: updates(False))
        made.register_step_post_hook(lambda *_: hold_optimizer(made, memory))
        return made

    def updates(whether: bool) -> None:
        nonlocal is_updating
        is_updating = whether

    def number() -> float | None:
        """Return the assumption for an unknown number; None in the model's passes."""
        if is_updating:
            return assumptions.number()  # e.g. the norm of an update
        return assumptions.no_overflow() if position.step == "optimizer" or not is_torch else None

    if is_torch:
        _require_trained(model)
    values.default = number
    with mode:
        hold_tensors(model.parameters(), model.buffers(), [batch], memory)
        with (
            runtimes_without_memory(),
            replicated_through(replicate),
            position.watching(),
            phases_of(position, model),
            memory.watching(),
            hide_fake_tensors(),
            simulated_rank(),
            ObserverMode(trackers.observers(), values),
        ):
            arguments: dict[str, Any] = {"loss": request.loss, "accumulate": request.accumulate}
            arguments |= {"optimizer": optimizer, "elementwise": True} if is_torch else {"optimizer": request.optimizer}
            position.begin("optimizer")
            step = simulated_step(schedule, request.target, **{**arguments, **request.config})
            places.attribute(model, position)
            if not is_torch:
                memory.reclassify_as_optimizer_state()
            hold_tensors(model.parameters(), model.buffers(), [batch], memory)
            hold_gradients(model.parameters(), memory)
            is_sharded = _hold_gathered(model, memory)
            if is_sharded:
                assumptions.shards(offloads=any(getattr(one.primitive, "offload", False) for one in schedule.records))
            memory.forget_peak()  # here all of the model exists before it is partitioned; a build makes it by tensor
            for _ in range(2):
                if is_sharded or not is_torch:
                    gc.collect()  # tensors that only reference cycles keep are not state of the runtime
                if not is_torch:
                    memory.reclassify_as_optimizer_state()
                trackers.begin_step()
                step(batch)
    missing = {parameter for one in replicas for parameter in one.without_gradients}
    assumptions.without_gradients([name for name, each in model.named_parameters() if each in missing])


def _require_trained(model: nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise EstimateError(
            "nothing to train: no parameter of the model requires a gradient",
            hint="model.requires_grad_(True), or parameter.requires_grad_(True) for some parameters",
        )


class _Nothing(torch.optim.Optimizer):
    """Step without an effect: an estimate without an optimizer."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None: ...  # type: ignore[override]


def hold_tensors(
    parameters: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor], batches: list[Any], memory: MemoryTracker
) -> None:
    """Count the tensors that exist before the first step by their kinds."""
    memory.hold(parameters, "parameters")
    memory.hold(buffers, "buffers")
    memory.hold((leaf for leaf in tree_leaves(batches) if isinstance(leaf, torch.Tensor)), "inputs")


def hold_gradients(parameters: Iterable[nn.Parameter], memory: MemoryTracker) -> None:
    """Count each gradient once it exists."""
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: memory.hold([p.grad], "gradients"))


class Gathered:
    """Count full parameters that units of ``fully_shard`` gather as parameters, and their gradients as gradients."""

    def __init__(self, memory: MemoryTracker) -> None:
        self._memory = memory
        self._known: set[int] = set()

    def __call__(self, parameters: Iterable[nn.Parameter]) -> None:
        gathered = list(parameters)
        self._memory.hold(gathered, "parameters")
        new = [one for one in gathered if id(one) not in self._known]
        self._known.update(map(id, new))
        hold_gradients(new, self._memory)


def _hold_gathered(model: nn.Module, memory: MemoryTracker) -> bool:
    """Count what units of ``fully_shard`` gather for their forward, and return whether there are units."""
    hold = Gathered(memory)
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in units:
        module.register_forward_pre_hook(lambda module, _: hold(module.parameters()))
    return bool(units)


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


def hold_optimizer(optimizer: torch.optim.Optimizer, memory: MemoryTracker) -> None:
    """Count the state of an optimizer."""
    state = tree_leaves(list(optimizer.state.values()))
    memory.hold((leaf for leaf in state if isinstance(leaf, torch.Tensor)), "optimizer")
