"""Megatron-core on CPUs, for tests only: engines are built and train there, which the product refuses.

Importing this module installs it. A hard-coded ``"cuda"`` in code of ours still fails.
"""

from __future__ import annotations

from typing import Any

import torch

from slapo_megatron.without_gpu import run_without_gpu

__all__ = ["install"]


def _communicate(
    self: Any,
    *,
    tensor_send_next: torch.Tensor | None,
    tensor_send_prev: torch.Tensor | None,
    recv_prev: bool,
    recv_next: bool,
    tensor_shape: Any,
    wait_on_reqs: bool = True,
) -> tuple[Any, Any, Any]:
    """Messages between stages over gloo, with tags: Megatron relies on the order of a CUDA stream.

    What is sent is detached: Megatron frees the memory of a sent tensor, perhaps before it has arrived.
    """
    (coming,), (back,) = self._communicate_shapes(tensor_send_next, tensor_send_prev, recv_prev, recv_next)
    group, size, rank = self.pp_group, self.pp_group.size(), self.pp_group.rank()
    following, previous = (rank + 1) % size, (rank - 1) % size
    works: dict[str, Any] = {}
    received: list[torch.Tensor | None] = [None, None]
    if tensor_send_next is not None:
        works["send_next"] = group.send([tensor_send_next.detach().contiguous()], following, 0)
    if tensor_send_prev is not None:
        works["send_prev"] = group.send([tensor_send_prev.detach().contiguous()], previous, 1)
    for tag, name, wanted, length, place in (
        (0, "recv_prev", recv_prev, coming, previous),
        (1, "recv_next", recv_next, back, following),
    ):
        if wanted:
            tensor = torch.empty(length, dtype=self.config.pipeline_dtype)
            works[name] = group.recv([tensor], place, tag)
            received[tag] = tensor.requires_grad_()
    for work in works.values() if wait_on_reqs else ():
        work.wait()
    return (*received, None if wait_on_reqs else works)


def take_back() -> None:
    """Tensors have torch's own methods again: for a process that goes on with other tests."""
    del torch.Tensor.cuda, torch.Tensor.type


def install() -> None:
    """Once a process; forked ranks have it with what was imported before."""
    run_without_gpu()
    from slapo_megatron.pipeline import Communicator

    Communicator._communicate = _communicate  # type: ignore[method-assign]


install()
