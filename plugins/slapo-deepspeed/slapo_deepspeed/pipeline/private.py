"""What is taken of DeepSpeed's pipeline beyond its documented names; nothing else does. A test looks after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["forget", "losses_of", "prepare"]


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


def forget(module: Any) -> None:
    """Let DeepSpeed forget a ``PipelineModule``'s groups, if they are the last ones that it was given.

    It asks those wherever a later engine has none of its own.
    """
    from deepspeed.utils import groups

    if groups.mpu is module.mpu():
        groups.mpu = None
