"""What replicas hold alike, for runtimes that do not see to it: buffers, as DistributedDataParallel treats them.

Otherwise running statistics are those of each replica's own samples, and an evaluation finds other ones on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["send_buffers"]


def send_buffers(model: nn.Module, group: Any) -> None:
    """Give every replica the buffers of the first one: a collective over ``group``, one for all of them.

    To be called before every training step.

    Args:
        model: whose buffers, persistent or not.
        group: of the replicas; None where there is one.
    """
    import torch
    import torch.distributed as dist

    buffers = [buffer for buffer in model.buffers() if buffer.numel() and not buffer.is_meta]
    if group is None or not buffers:
        return
    with torch.no_grad():
        pieces = [buffer.detach().contiguous().reshape(-1).view(torch.uint8) for buffer in buffers]
        flat = torch.cat(pieces)
        dist.broadcast(flat, group=group, group_src=0)
        if dist.get_rank(group) == 0:
            return
        for buffer, piece in zip(buffers, flat.split([piece.numel() for piece in pieces]), strict=True):
            # The bytes of one may start where its type may not be read: a copy starts where memory does.
            buffer.copy_(piece.clone().view(buffer.dtype).view(buffer.shape))
