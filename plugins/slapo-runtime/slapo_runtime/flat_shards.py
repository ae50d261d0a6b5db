"""Shards of parameters in flat tensors, for runtimes that partition them; broadcast of buffers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["FlatShard", "buckets", "gathered", "is_rounding", "send_buffers"]


@dataclass(frozen=True)
class FlatShard:
    """This rank's shard of one parameter, in a flat tensor.

    Args:
        flat: the tensor that the optimizer steps, and holds state for.
        start: of the first element, in ``flat``.
        offset: of the first element, in the parameter.
        length: in elements; 0 if other replicas hold all of them.
        shape: of the full parameter.
    """

    flat: torch.Tensor
    start: int
    offset: int
    length: int
    shape: tuple[int, ...]

    @classmethod
    def full(cls, flat: torch.Tensor, shape: tuple[int, ...]) -> FlatShard:
        """Return the full parameter, in a flat tensor of its own, as a shard."""
        return cls(flat, 0, 0, flat.numel(), shape)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of ``flat``, or of a tensor of the same shape."""
        return flat.detach().view(-1).narrow(0, self.start, self.length)

    def part(self, value: torch.Tensor) -> torch.Tensor:
        """Return the same elements of a full tensor."""
        return value.detach().reshape(-1).narrow(0, self.offset, self.length)


def gathered(
    shard: torch.Tensor, offset: int, shape: tuple[int, ...], groups: Iterable[Any], *, device: torch.device
) -> torch.Tensor:
    """All-gather a parameter from its flat shards, bit for bit.

    A collective. The shards are added as integers, each among zeros, which preserves signed zeros and NaNs.

    Args:
        shard: this rank's elements, flat; of one type on all ranks, and disjoint from other ranks'.
        offset: of its first element, in row-major order.
        shape: of the full parameter.
        groups: the replicas are the product of these; none for a single replica.
        device: of the process groups.
    """
    import torch

    count = math.prod(shape)
    size = count * shard.element_size()
    memory = torch.zeros(-(-size // 4), dtype=torch.int32, device=device)
    full = memory.view(torch.uint8)[:size].view(shard.dtype)
    full[offset : offset + shard.numel()].copy_(shard.detach())
    for group in groups:
        import torch.distributed as dist

        dist.all_reduce(memory, group=group)
    return full.view(shape)


def is_rounding(copy: torch.Tensor, trained: torch.Tensor) -> bool:
    """Return whether a copy equals the rounded main copy, NaNs included."""
    rounded = trained.to(copy.device, copy.dtype)
    return bool(((copy == rounded) | (copy.isnan() & rounded.isnan())).all())


def send_buffers(model: nn.Module, group: Any) -> None:
    """Broadcast the first replica's buffers, in one collective over ``group``.

    To be called before every training step. All buffers are sent, as by DistributedDataParallel: replicas may have
    changed different ones, and messages of unequal sizes would be confused.

    Args:
        model: with the buffers, persistent or not.
        group: of the replicas; None for a single one.
    """
    import torch
    import torch.distributed as dist

    if group is None:
        return
    buffers = [buffer for buffer in model.buffers() if buffer.numel() and not buffer.is_meta]
    if not buffers:
        return
    with torch.no_grad():
        shards = [buffer.detach().contiguous().reshape(-1).view(torch.uint8) for buffer in buffers]
        flat = torch.cat(shards)
        dist.broadcast(flat, group=group, group_src=0)
        if dist.get_rank(group) == 0:
            return
        for buffer, shard in zip(buffers, flat.split([shard.numel() for shard in shards]), strict=True):
            # The bytes may not be aligned for the type of the buffer; a copy is.
            buffer.copy_(shard.clone().view(buffer.dtype).view(buffer.shape))


def buckets(tensors: Iterable[torch.Tensor], limit: int) -> Iterator[list[torch.Tensor]]:
    """Group tensors of one type and device, in their order, for one collective each.

    Args:
        tensors: the same on every rank, in the same order.
        limit: bytes of a bucket; a larger tensor gets its own bucket.
    """
    by_kind: dict[tuple[str, str], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((str(tensor.dtype), tensor.device.type), []).append(tensor)
    for _, own in sorted(by_kind.items()):
        bucket: list[torch.Tensor] = []
        size = 0
        for tensor in own:
            size += tensor.nbytes
            if bucket and size > limit:
                yield bucket
                bucket, size = [], tensor.nbytes
            bucket.append(tensor)
        yield bucket
