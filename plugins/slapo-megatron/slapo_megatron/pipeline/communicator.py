"""What Megatron's ranks along ``pp`` send to each other, and over what. Imports Megatron: import it in functions.

Megatron's schedules know one shape of all messages, and our stages send messages of several. A rank knows them all:
they come in the order in which its neighbor runs its stages. So the communicator tells the shape of the next one
where Megatron's would ask the neighbor for it (``variable_seq_lengths``).

On CPUs messages go over the mesh's group, and gradients have a tag of their own there: where two ranks are neighbors
on both sides, Megatron's would take one message for the other.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

if TYPE_CHECKING:
    from slapo_megatron.pipeline.messages import Messages

__all__ = ["Communicator"]

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
        """Of what comes, known without asking."""
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
        # Detached: Megatron takes the memory of what it has sent from the tensor, perhaps before it is there.
        return self._own.send([tensor.detach().contiguous()], place, tag)

    def _receive(self, length: int, place: int, tag: int) -> tuple[torch.Tensor, Any]:
        tensor = torch.empty(length, dtype=self.config.pipeline_dtype, device=self._device)
        return tensor.requires_grad_(), self._own.recv([tensor.detach()], place, tag)
