"""One tensor put together of what replicas hold of it, to the last bit."""

from __future__ import annotations

import math
from typing import Any

import torch

__all__ = ["gathered"]


def gathered(
    piece: torch.Tensor, offset: int, shape: tuple[int, ...], group: Any, *, device: torch.device
) -> torch.Tensor:
    """The whole tensor, on every rank of a group: a collective.

    The pieces are added as integers, each among zeros: that keeps zeros with a sign, and whatever is no number.

    Args:
        piece: this rank's elements, flat; of one type on all ranks. Nobody else has the same ones.
        offset: of its first element, in row-major order.
        shape: of the whole one.
        group: the ranks; None for one alone.
        device: that the group sends from.
    """
    count = math.prod(shape)
    size = count * piece.element_size()
    memory = torch.zeros(-(-size // 4), dtype=torch.int32, device=device)
    whole = memory.view(torch.uint8)[:size].view(piece.dtype)
    whole[offset : offset + piece.numel()].copy_(piece.detach())
    if group is not None:
        import torch.distributed as dist

        dist.all_reduce(memory, group=group)
    return whole.view(shape)
