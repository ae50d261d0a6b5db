"""Where a runtime keeps a parameter's trained values in a flat tensor: what implementations of storages share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["Place", "gathered", "is_rounding"]


@dataclass(frozen=True)
class Place:
    """What this rank holds of one parameter's trained values.

    Args:
        flat: the tensor that the optimizer steps; it keeps its state for it.
        start: of the first element, in ``flat``.
        offset: of the first element, in the parameter.
        length: in elements; 0 where other replicas hold them all.
        shape: of the parameter, whole.
    """

    flat: torch.Tensor
    start: int
    offset: int
    length: int
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, flat: torch.Tensor, shape: tuple[int, ...]) -> Place:
        """That of a parameter that a tensor of the same number of elements stands for."""
        return cls(flat, 0, 0, flat.numel(), shape)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's elements in ``flat``, or in a tensor of the same shape."""
        return flat.detach().view(-1).narrow(0, self.start, self.length)

    def part(self, value: torch.Tensor) -> torch.Tensor:
        """The same elements of a whole tensor."""
        return value.detach().reshape(-1).narrow(0, self.offset, self.length)


def gathered(
    piece: torch.Tensor, offset: int, shape: tuple[int, ...], groups: Iterable[Any], *, device: torch.device
) -> torch.Tensor:
    """The whole tensor, put together of what replicas hold of it to the last bit, on every one of them.

    A collective. The pieces are added as integers, each among zeros: that keeps zeros with a sign, and whatever is no
    number.

    Args:
        piece: this rank's elements, flat; of one type on all ranks. Nobody else has the same ones.
        offset: of its first element, in row-major order.
        shape: of the whole one.
        groups: the replicas are the product of these; none for one alone.
        device: that the groups send from.
    """
    import torch

    count = math.prod(shape)
    size = count * piece.element_size()
    memory = torch.zeros(-(-size // 4), dtype=torch.int32, device=device)
    whole = memory.view(torch.uint8)[:size].view(piece.dtype)
    whole[offset : offset + piece.numel()].copy_(piece.detach())
    for group in groups:
        import torch.distributed as dist

        dist.all_reduce(memory, group=group)
    return whole.view(shape)


def is_rounding(copy: torch.Tensor, trained: torch.Tensor) -> bool:
    """Whether a copy is the rounding of what is trained; what is no number is the same as that."""
    rounded = trained.to(copy.device, copy.dtype)
    return bool(((copy == rounded) | (copy.isnan() & rounded.isnan())).all())
