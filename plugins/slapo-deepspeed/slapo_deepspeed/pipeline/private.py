"""What is taken of DeepSpeed's pipeline beyond its documented names; nothing else does. A test looks after it.

DeepSpeed sends over the user's own process group of all ranks, where a rank that waits for one that has failed goes on
waiting. During our steps it sends over groups that break.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

__all__ = ["forget", "groups_of", "losses_of", "prepare", "sending_over"]


def prepare(engine: Any, received: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Tell DeepSpeed what the tensors of this step are, so that no rank asks another one.

    It would keep its buffers by place and size, and take one of another type for the same.

    Args:
        engine: DeepSpeed's.
        received: of the sizes and types of what comes from the rank before.
        gradients: likewise, what comes back from the next one.
    """
    engine.first_output_send = False
    engine.pipe_recv_buf = tuple(received)
    engine.grad_layer = list(gradients)


def losses_of(engine: Any) -> list[torch.Tensor]:
    """The losses of the micro-batches of the last step; on the last rank along ``pipe``."""
    return list(engine.fwd_outputs)


def groups_of(module: Any) -> list[Any]:
    """The process groups that a ``PipelineModule`` makes."""
    grid = module.mpu()
    found = [
        module.world_group,
        grid.get_model_parallel_group(),
        grid.get_data_parallel_group(),
        grid.get_pipe_parallel_group(),
        grid.get_slice_parallel_group(),
    ]
    return list(dict.fromkeys(found))


def forget(module: Any) -> None:
    """Let DeepSpeed forget a ``PipelineModule``'s groups, if they are the last ones that it was given.

    It asks those wherever a later engine has none of its own.
    """
    from deepspeed.utils import groups

    if groups.mpu is module.mpu():
        groups.mpu = None


@contextlib.contextmanager
def sending_over(group: Any) -> Iterator[None]:
    """Let DeepSpeed's ranks along ``pipe`` send to each other over a group; its places are the stages' numbers."""
    from deepspeed.runtime.pipe import p2p

    def send(tensor: torch.Tensor, dest_stage: int, async_op: bool = False) -> None:
        group.send([tensor.contiguous()], dest_stage, 0).wait()

    def receive(tensor: torch.Tensor, src_stage: int, async_op: bool = False) -> None:
        group.recv([tensor], src_stage, 0).wait()

    before = p2p.send, p2p.recv
    p2p.send, p2p.recv = send, receive
    try:
        yield
    finally:
        p2p.send, p2p.recv = before
