"""Run the stages by Megatron's schedules, with their P2P messages. Imports Megatron: import it in functions."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_pipelining_with_interleaving as interleaved,
    forward_backward_pipelining_without_interleaving as one_forward_one_backward,
)
from megatron.core.process_groups_config import ProcessGroupCollection

if TYPE_CHECKING:
    from slapo_megatron.runtime import Megatron
    from slapo_runtime.stage_runner import RankStages, Work


@dataclass(frozen=True)
class Messages:
    """The messages to a rank.

    Args:
        from_previous: numbers of elements of what its stages are sent.
        from_next: of the gradients of the messages to the next rank.
        dtype: of all.
        device: where stages compute.
    """

    from_previous: Sequence[int]
    from_next: Sequence[int]
    dtype: torch.dtype
    device: torch.device


def order_of(chunks: int, count: int, group: int) -> list[int]:
    """Return the order in which a rank runs its stages: equal on all ranks.

    Args:
        chunks: stages of a rank.
        count: of micro-batches.
        group: how many of these a stage runs before the rank goes on to its next one.
    """
    found = []
    for start in range(0, count, group):
        for chunk in range(chunks):
            found += [chunk] * min(group, count - start)
    return found


def messages_of(form: RankStages, rank: int, size: int, order: Sequence[int]) -> Messages:
    """Return the messages to a rank in a step.

    Args:
        form: of the micro-batches, with joined messages.
        rank: along ``pp``.
        size: of that mesh dimension.
        order: as :func:`order_of` gives it; gradients come with the last stage first.
    """
    lengths = {stage: message.length for stage, message in form.messages.items()}
    previous, following = (rank - 1) % size, (rank + 1) % size
    last = max(order)
    sent = (chunk * size + previous for chunk in order)
    returned = ((last - chunk) * size + following - 1 for chunk in order)
    dtype = next(iter(form.messages.values())).dtype
    return Messages(
        [lengths[stage] for stage in sent if stage in lengths],
        [lengths[stage] for stage in returned if stage in lengths],
        dtype,
        form.device,
    )


_FORWARD, _BACKWARD = 0, 1  # tags


class Communicator(P2PCommunicator):  # type: ignore[misc]
    """Sends messages of the sizes that stages make.

    Args:
        group: Megatron's, along ``pp``.
        config: Megatron's.
        own: the mesh's group of the same ranks, to send over; None: Megatron's.
    """

    def __init__(self, group: Any, config: Any, own: Any = None) -> None:
        config = copy.copy(config)
        config.variable_seq_lengths = True  # asks for the shape of every message
        if group.size() == 2:
            config.batch_p2p_comm = False  # both neighbors are one rank: batched messages are taken for each other
        super().__init__(group, config)
        self._own = own
        size, rank = group.size(), group.rank()
        self._next, self._previous = (rank + 1) % size, (rank - 1) % size
        self._from_previous: Iterator[int] = iter(())
        self._from_next: Iterator[int] = iter(())

    def begin(self, messages: Messages) -> None:
        """A step: what comes is this."""
        self.config.pipeline_dtype = messages.dtype
        self._device = messages.device
        self._from_previous, self._from_next = iter(messages.from_previous), iter(messages.from_next)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        """Return the known shapes of the messages, without communication."""
        return [next(self._from_previous)] if recv_prev else [0], [next(self._from_next)] if recv_next else [0]

    def _communicate(
        self,
        *,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, Any]:
        if self._own is None:
            return super()._communicate(  # type: ignore[no-any-return]
                tensor_send_next=tensor_send_next,
                tensor_send_prev=tensor_send_prev,
                recv_prev=recv_prev,
                recv_next=recv_next,
                tensor_shape=tensor_shape,
                wait_on_reqs=wait_on_reqs,
            )
        (coming,), (back,) = self._communicate_shapes(tensor_send_next, tensor_send_prev, recv_prev, recv_next)
        works = {}
        if tensor_send_next is not None:
            works["send_next"] = self._send(tensor_send_next, self._next, _FORWARD)
        if tensor_send_prev is not None:
            works["send_prev"] = self._send(tensor_send_prev, self._previous, _BACKWARD)
        received = gradient = None
        if recv_prev:
            received, works["recv_prev"] = self._receive(coming, self._previous, _FORWARD)
        if recv_next:
            gradient, works["recv_next"] = self._receive(back, self._next, _BACKWARD)
        if not wait_on_reqs:
            return received, gradient, works
        for work in works.values():
            work.wait()
        return received, gradient, None

    def _send(self, tensor: torch.Tensor, place: int, tag: int) -> Any:
        # Detached: Megatron frees the memory of a sent tensor, perhaps before it has arrived.
        return self._own.send([tensor.detach().contiguous()], place, tag)

    def _receive(self, length: int, place: int, tag: int) -> tuple[torch.Tensor, Any]:
        tensor = torch.empty(length, dtype=self.config.pipeline_dtype, device=self._device)
        return tensor.requires_grad_(), self._own.recv([tensor.detach()], place, tag)


class Schedule:
    """1F1B, or interleaved 1F1B where a rank has several stages.

    Args:
        megatron: its objects; chunks are those of this rank.
        own: the mesh's group along ``pp``, to send over; None: Megatron's.
    """

    def __init__(self, megatron: Megatron, own: Any = None) -> None:
        self._chunks, self._config = megatron.chunks, megatron.config
        self._group = parallel_state.get_pipeline_model_parallel_group()
        self._communicator = Communicator(self._group, self._config, own)

    def run(self, form: RankStages, works: Sequence[Work], count: int, *, backward: bool) -> list[torch.Tensor]:
        """All passes of a step, and what comes after them.

        Args:
            form: of the micro-batches.
            works: of each stage of this rank.
            count: of micro-batches.
            backward: whether gradients go back and are finished by ``config.finalize_model_grads_func``.

        Returns:
            the losses of the micro-batches, on the last rank along ``pp``; nothing on others.
        """
        chunks = len(self._chunks)
        group = self._config.microbatch_group_size_per_vp_stage if chunks > 1 else count
        order = order_of(chunks, count, group)
        self._communicator.begin(messages_of(form, self._group.rank(), self._group.size(), order))
        for chunk, work in zip(self._chunks, works, strict=True):
            chunk.module.begin(work)
        numbers = [iter(range(count)) for _ in self._chunks]
        arguments = {
            "forward_step_func": _forward_step,
            "num_microbatches": count,
            "seq_length": 1,  # the communicator knows the shapes
            "micro_batch_size": 1,
            "forward_only": not backward,
            "p2p_communicator": self._communicator,
            "pg_collection": _groups(),
        }
        try:
            if chunks > 1:
                found = interleaved(data_iterator=numbers, model=self._chunks, **arguments)
            else:
                found = one_forward_one_backward(data_iterator=numbers[0], model=self._chunks[0], **arguments)
        finally:
            for chunk in self._chunks:
                chunk.module.end()
        return [one["loss"] for one in found]


def _forward_step(numbers: Iterator[int], chunk: Any) -> tuple[Any, Any]:
    """Run one micro-batch of one stage, called by Megatron."""
    number = next(numbers)
    outputs = chunk(number)
    return outputs, functools.partial(_loss, chunk.module.work, number)


def _loss(work: Work, number: int, outputs: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss for the backward pass, which Megatron divides in place, and the step's loss.

    It is the mean over one thing, the micro-batch: ranks along ``cp`` are replicas. Without that number Megatron takes
    their losses as partial sums, and multiplies them by their number.
    """
    loss = work.loss(outputs, number)
    one = torch.ones((), dtype=torch.int, device=loss.device)
    return loss.clone(), one, {"loss": loss.detach().clone()}


def _groups() -> ProcessGroupCollection:
    """Return the process groups that the schedules would take from ``parallel_state``."""
    found = ProcessGroupCollection()
    found.tp = parallel_state.get_tensor_model_parallel_group()
    found.pp = parallel_state.get_pipeline_model_parallel_group()
    found.cp = parallel_state.get_context_parallel_group()
    found.embd = parallel_state.get_embedding_group(check_initialized=False)
    found.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    found.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    return found
