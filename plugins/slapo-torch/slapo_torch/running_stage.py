"""Run the stages of a pipeline rank under torch's schedules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import BuildError
from slapo_runtime.stages.p2p_packing import check_sent
from slapo_runtime.stages.runner import SeededWork, SignatureFacts
from slapo_torch.private import storage_id
from slapo_torch.split_backward import SplitCheck, backward_of_inputs
from slapo_torch.torch_pipelining import StageBase, make_schedule, step

if TYPE_CHECKING:
    from slapo_runtime.stages.partition import Liveness, Partition, Value
    from slapo_torch.schedules import PipelineSchedule


class Received:
    """One received value of one micro-batch.

    The stage's module reads the buffer without a copy, as a tensor that is not a leaf, so that it may write to it. The
    gradient is kept here instead of in a leaf: from the stage's own uses, from later writes, and from a relayed value.

    Args:
        buffer: the received tensor, without other users.
        carries_gradient: whether a gradient is sent back.
    """

    def __init__(self, buffer: torch.Tensor, *, carries_gradient: bool) -> None:
        self.gradient: torch.Tensor | None = None
        self._like = (buffer.shape, buffer.dtype, buffer.device)
        self.start: torch.Tensor | None = None
        if carries_gradient and torch.is_grad_enabled():
            self.start = torch.empty(0, device=buffer.device, requires_grad=True)
            buffer = _Arrival.apply(self.start, [buffer], self)  # type: ignore[no-untyped-call]
        self._tensor: torch.Tensor | None = buffer

    def take(self) -> torch.Tensor:
        """Return the tensor for the stage, once."""
        tensor, self._tensor = self._tensor, None
        assert tensor is not None
        return tensor

    def give_back(self) -> torch.Tensor:
        """Return the gradient, contiguous; zeros for an unused value."""
        gradient, self.gradient = self.gradient, None
        if gradient is None:
            shape, dtype, device = self._like
            return torch.zeros(shape, dtype=dtype, device=device)
        return gradient.contiguous()


class _Arrival(torch.autograd.Function):
    """Make a buffer differentiable, with the start of its graph here."""

    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, buffer: list[torch.Tensor], received: Received) -> torch.Tensor:
        ctx.received = received
        return buffer.pop()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        received = ctx.received
        received.gradient = gradient if received.gradient is None else received.gradient + gradient
        return None, None, None


@dataclass
class PipelineWork(SeededWork):
    """Inputs and results of one step of a rank's stages.

    Args:
        inputs: for each micro-batch: the model's arguments by parameter.
        loss: computes the loss of a micro-batch from its number and the output values by name, on the last stage.
        at: called with the present work, for the message of an error.
        seed: of the stages' RNG streams; None uses torch's default generator.
        keep_outputs: whether the output values of stages are kept.
        stage_is_over: called with the index of a stage after its last backward pass.
        scale: of the losses in the backward passes, a scalar tensor; None without.
        drew: whether a stage used its RNG stream.
        losses: by micro-batch, where the last stage is.
        outputs: by name and micro-batch.
    """

    inputs: Sequence[Mapping[str, Any]]
    loss: Callable[[int, Mapping[str, torch.Tensor]], torch.Tensor]
    at: Callable[[str], None]
    seed: int | None = None
    keep_outputs: bool = False
    stage_is_over: Callable[[int], None] = lambda stage: None
    scale: torch.Tensor | None = None
    drew: bool = False
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)


@dataclass
class _Flight:
    """One micro-batch from its arrival to its backward pass."""

    buffers: list[torch.Tensor] = field(default_factory=list)  # to receive in
    received: dict[str, Received] = field(default_factory=dict)
    sent: list[torch.Tensor] = field(default_factory=list)
    loss: torch.Tensor | None = None
    gradients: list[torch.Tensor] = field(default_factory=list)  # of the sent values, as received


class RunningStage(StageBase):
    """A stage of a :class:`~slapo_runtime.stages.partition.Partition` on the rank that runs it.

    The partition has all shapes, so no metadata is exchanged before the first step. Only values with a gradient get
    one sent back.

    Args:
        partition: the stages.
        liveness: the values that each sends to the next.
        index: of this stage.
        ranks: the rank along ``pp`` of each stage.
        group: of the ranks along ``pp``, in their order.
        device: of the stage.
        count: the number of micro-batches of a step.
        splits: whether the schedule splits backward passes.

    Attributes:
        work: of the running step.
        sent_bytes: to other ranks, forward and backward, since the construction.
    """

    work: PipelineWork

    def __init__(
        self,
        partition: Partition,
        liveness: Liveness,
        index: int,
        ranks: Sequence[int],
        *,
        group: Any,
        device: torch.device,
        count: int,
        splits: bool = False,
    ) -> None:
        stage = partition.stages[index]
        super().__init__(stage.module, index, len(partition.stages), device, group)
        self._stage, self._ranks, self._count = stage, tuple(ranks), count
        self._coming = [partition.values[name] for name in liveness.received(index)]
        self._going = [partition.values[name] for name in liveness.sent(index)]
        self._output_names = partition.output.names
        self._kept = _storages(stage.module)
        self._flights: dict[int, _Flight] = {}
        self._back: dict[int, list[torch.Tensor]] = {}  # gradients to send back
        self._later: dict[int, Callable[[], None]] = {}  # second parts of backward passes
        self._passed = 0  # finished backward passes of the step, with their second parts
        self._split_check = SplitCheck(stage.module, f"stage {index}") if splits else None
        self.sent_bytes = [0, 0]

    @property
    def unsplit_reason(self) -> str:
        """The reason against splitting the backward pass; "" without one."""
        return "" if self._split_check is None else self._split_check.reason

    # -- received and sent values, in the order of liveness -----------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        flight = self._flights.setdefault(fwd_chunk_id, _Flight())
        flight.buffers = [self._empty(value) for value in self._coming]
        return self._operations(dist.irecv, flight.buffers, self.stage_index - 1, forward=True, number=fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        if self.is_last:
            return []
        flight = self._flights[fwd_chunk_id]
        tensors = [self._own(one) for one in flight.sent]
        self.sent_bytes[0] += sum(tensor.nbytes for tensor in tensors)
        if not self.has_backward:
            del self._flights[fwd_chunk_id]
        return self._operations(dist.isend, tensors, self.stage_index + 1, forward=True, number=fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        if not self.has_backward or self.is_last:
            return []
        flight = self._flights[bwd_chunk_id]
        flight.gradients = [self._empty(value) for value in self._going if value.requires_grad]
        return self._operations(dist.irecv, flight.gradients, self.stage_index + 1, forward=False, number=bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        if not self.has_backward or self.is_first:
            return []
        tensors = self._back.pop(bwd_chunk_id)
        self.sent_bytes[1] += sum(tensor.nbytes for tensor in tensors)
        return self._operations(dist.isend, tensors, self.stage_index - 1, forward=False, number=bwd_chunk_id)

    def set_local_fwd_input(self, prev_stage_outputs: Sequence[torch.Tensor], mb_index: int) -> None:
        flight = self._flights.setdefault(mb_index, _Flight())
        flight.buffers = [one.detach().clone(memory_format=torch.contiguous_format) for one in prev_stage_outputs]

    def get_local_bwd_output(self, mb_index: int) -> list[torch.Tensor]:
        return self._back.pop(mb_index) if self.has_backward else []

    def set_local_bwd_input(self, next_stage_bwd_outputs: list[torch.Tensor], mb_index: int) -> None:
        if self.has_backward:
            self._flights[mb_index].gradients = next_stage_bwd_outputs

    def _empty(self, value: Value) -> torch.Tensor:
        return torch.empty(value.shape, dtype=value.dtype, device=self.device)

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous tensor to send, to which the stage does not write."""
        one = tensor.detach()
        if storage_id(one) in self._kept:
            return one.clone(memory_format=torch.contiguous_format)
        return one.contiguous()

    def _operations(
        self, operation: Any, tensors: Sequence[torch.Tensor], stage: int, *, forward: bool, number: int
    ) -> list[Any]:
        """Make an operation for each tensor with elements, tagged by its boundary."""
        boundary = max(stage, self.stage_index)
        tag = (2 * boundary + forward) * self._count + number
        peer = self._ranks[stage]
        return [
            dist.P2POp(operation, tensor, group=self.group, tag=tag, group_peer=peer)
            for tensor in tensors
            if tensor.numel()
        ]

    # -- the passes ---------------------------------------------------------------------------------------------------

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        self._at("the forward", fwd_chunk_id)
        flight = self._flights.setdefault(fwd_chunk_id, _Flight())
        for value, buffer in zip(self._coming, flight.buffers, strict=True):
            flight.received[value.name] = Received(buffer, carries_gradient=value.requires_grad and self.has_backward)
        flight.buffers = []
        there = {name: one.take() for name, one in flight.received.items()}
        made = self._made(fwd_chunk_id, there)
        there.update(made)
        if self.work.keep_outputs:
            for name in self._output_names:
                if name in made:
                    self.work.outputs.setdefault(name, {})[fwd_chunk_id] = made[name].detach()
        if self.is_last:
            self._at("the loss", fwd_chunk_id)
            values = {name: there[name] for name in self._output_names if name in there}
            flight.loss = self.work.loss(fwd_chunk_id, values)
            self.work.losses[fwd_chunk_id] = flight.loss.detach()
            if not self.has_backward:
                del self._flights[fwd_chunk_id]
            return flight.loss
        for value in self._going:
            check_sent(value, there[value.name], f"stage {self.stage_index}")
        flight.sent = [there[value.name] for value in self._going]
        if not self.has_backward and self._ranks[self.stage_index + 1] == self._ranks[self.stage_index]:
            return tuple(self._flights.pop(fwd_chunk_id).sent)
        return tuple(flight.sent)

    def _at(self, what: str, number: int) -> None:
        self.work.at(f"stage {self.stage_index} in {what} of micro-batch {number}")

    def _made(self, number: int, there: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        with contextlib.nullcontext() if self._split_check is None else self._split_check.watch_forward():
            return self.work.run(self._stage, self.work.inputs[number], there, number, self.device)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not self.has_backward:
            return
        self._at("the backward", bwd_chunk_id)
        flight = self._flights.pop(bwd_chunk_id)
        roots, gradients = self._roots(flight)
        starts = [one.start for one in flight.received.values() if one.start is not None]
        if self._split_check is not None:
            self._split_check.find_compiled(roots)
        if not roots:
            pass
        elif full_backward or self.unsplit_reason:
            torch.autograd.backward(roots, gradients)
        elif not starts:  # no stage waits for a gradient
            self._later[bwd_chunk_id] = lambda: torch.autograd.backward(roots, gradients)
        else:
            self._later[bwd_chunk_id] = backward_of_inputs(roots, gradients, starts)
        if not self.is_first:
            self._back[bwd_chunk_id] = [
                flight.received[value.name].give_back() for value in self._coming if value.requires_grad
            ]
        if full_backward:
            self._count_passed()

    def _roots(self, flight: _Flight) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the roots of the backward pass, and their gradients."""
        if flight.loss is not None:
            if not flight.loss.requires_grad:
                return [], []
            gradient = torch.full_like(flight.loss, 1.0 / self._count)
            return [flight.loss], [gradient if self.work.scale is None else gradient.mul_(self.work.scale)]
        with_gradient = [one for one, value in zip(flight.sent, self._going, strict=True) if value.requires_grad]
        pairs = [
            (one if one.grad_fn is not None else one.view_as(one), gradient)
            for one, gradient in zip(with_gradient, flight.gradients, strict=True)
            if one.requires_grad
        ]
        return [one for one, _ in pairs], [gradient for _, gradient in pairs]

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        later = self._later.pop(bwd_chunk_id, None)
        if later is not None:
            self._at("the backward", bwd_chunk_id)
            later()
        self._count_passed()

    def _count_passed(self) -> None:
        self._passed += 1
        if self._passed == self._count:
            self.work.stage_is_over(self.stage_index)

    def clear_runtime_states(self) -> None:
        for kept in (self._flights, self._back, self._later):
            kept.clear()
        self._passed = 0


def _storages(module: nn.Module) -> frozenset[int]:
    """Return the storages of a module's tensors, which sent values may share."""
    tensors = [*module.parameters(), *module.buffers()]
    return frozenset(storage_id(one) for one in tensors if one.numel() and not one.is_meta)


class PipelineRunner(SignatureFacts):
    """Run the steps of a rank's stages, with equal arguments on all ranks.

    Args:
        partition: for one input signature and one mode.
        liveness: the values that each stage sends to the next.
        schedule: of the pipeline.
        ranks: the rank along ``pp`` of each stage.
        rank: this rank.
        group: of the ranks along ``pp``.
        device: of the stages.
        count: of micro-batches.
    """

    def __init__(
        self,
        partition: Partition,
        liveness: Liveness,
        schedule: PipelineSchedule,
        ranks: Sequence[int],
        rank: int,
        *,
        group: Any,
        device: torch.device,
        count: int,
    ) -> None:
        self.partition = partition
        self._count, self._group = count, group
        self.stages = [
            RunningStage(
                partition,
                liveness,
                index,
                ranks,
                group=group,
                device=device,
                count=count,
                splits=schedule.splits_backward,
            )
            for index in range(len(partition.stages))
            if ranks[index] == rank
        ]
        self._holders: dict[int, list[int]] = {}  # by parameter
        for stage in self.stages:
            for parameter in stage.submod.parameters():
                self._holders.setdefault(id(parameter), []).append(stage.stage_index)
        stages: Any = self.stages[0] if schedule.is_single else self.stages
        try:
            self._schedule = make_schedule(schedule.class_name, stages, count, loss_fn=_as_it_is, scale_grads=False)
        except RuntimeError as error:  # of zero-bubble schedules, and modules in torch.compile's wrapper
            raise BuildError(
                f"pipeline_schedule='{schedule.name}' does not run these stages: {error}",
                hint='compile modules in place, module.compile(), or pipeline_schedule="1f1b"',
            ) from error

    def divide(
        self, parameters: Sequence[torch.Tensor]
    ) -> tuple[dict[int, list[torch.Tensor]], list[tuple[torch.Tensor, bool]]]:
        """Divide parameters of this rank by the stage that holds them.

        Returns:
            by stage index, the parameters of this stage alone; and all others, with whether a stage of this rank holds
            them.
        """
        by_stage: dict[int, list[torch.Tensor]] = {stage.stage_index: [] for stage in self.stages}
        others: list[tuple[torch.Tensor, bool]] = []
        for parameter in parameters:
            found = self._holders.get(id(parameter), [])
            if len(found) == 1:
                by_stage[found[0]].append(parameter)
            else:
                others.append((parameter, bool(found)))
        return by_stage, others

    def run(
        self,
        inputs: Sequence[Mapping[str, Any]],
        loss: Callable[[int, Mapping[str, torch.Tensor]], torch.Tensor],
        *,
        backward: bool,
        at: Callable[[str], None] = lambda what: None,
        seed: int | None = None,
        keep_outputs: bool = False,
        stage_is_over: Callable[[int], None] = lambda stage: None,
        scale: torch.Tensor | None = None,
    ) -> PipelineWork:
        """Run one step; gradients are accumulated.

        Args:
            inputs: the arguments of each micro-batch.
            loss: computes the loss of a micro-batch from its number and the output values.
            backward: whether the gradients of the mean loss are computed.
            at: called with the present work.
            seed: of the stages' RNG streams; None uses torch's default generator.
            keep_outputs: whether the output values of this rank's stages are kept.
            stage_is_over: called with the index of each stage after its last backward pass, with complete gradients.
            scale: of the losses in the backward passes.
        """
        work = PipelineWork(inputs, loss, at, seed, keep_outputs, stage_is_over, scale, drew=bool(self.uses_rng))
        for stage in self.stages:
            stage.work = work
        try:
            step(self._schedule, self._count, backward=backward)
        finally:
            for stage in self.stages:
                stage.clear_runtime_states()
                stage.work = PipelineWork((), loss, at)
        return work


def _as_it_is(loss: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Return the loss, which the last stage's forward computes."""
    return loss
