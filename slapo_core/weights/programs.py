"""What initializers wrote into one tensor, as operations that can be run for any piece of it.

The random numbers of a tensor are drawn in blocks, each from a generator that is seeded by the tensor's name and the
number of the block. The blocks depend on the full shape alone, so that every layout has the same values, and a rank
draws only the blocks that reach into its own piece, one after the other.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.weights.sources import placed

if TYPE_CHECKING:
    from slapo_core.spec.layout import Layout
    from slapo_core.spec.mesh import Mesh

__all__ = ["Box", "Program", "Write", "blocks", "seed_of"]

Box = tuple[tuple[int, int], ...]  # (start, length) along each axis
_BLOCK = 1 << 16  # elements; changing it changes the initial values of every model


@dataclass(frozen=True)
class Write:
    """One in-place operation, the same for every element.

    Args:
        operation: e.g. ``torch.ops.aten.mul_.Tensor``; called with the elements and the arguments.
        arguments: numbers.
        box: the elements that it was run on.
        value: of a copy, what was copied: of the box's shape.
    """

    operation: Any
    arguments: tuple[Any, ...]
    box: Box
    value: torch.Tensor | None = None

    def apply(self, block: torch.Tensor, box: Box) -> None:
        """Run it on ``block``, the elements ``box`` of the tensor."""
        shared = [_overlap(own, other) for own, other in zip(self.box, box, strict=True)]
        if any(length <= 0 for _, length in shared):
            return
        part = block[_slices(shared, box)] if shared != list(box) else block
        if self.value is not None:
            part.copy_(self.value[_slices(shared, self.box)])
        else:
            self.operation(part, *self.arguments)


@dataclass(frozen=True)
class Program:
    """The operations that give a tensor its initial value.

    Args:
        shape: the tensor's full shape, in elements.
        dtype: its element type.
        draw: the operation that draws all of it, e.g. ``torch.ops.aten.normal_.default``, and its numbers; None where
            the first of ``writes`` gives all elements a value.
        writes: what was run after it, in order.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    draw: tuple[Any, tuple[Any, ...]] | None
    writes: tuple[Write, ...]

    def piece(self, layout: Layout, mesh: Mesh | None, key: str) -> torch.Tensor:
        """This rank's piece, on the CPU.

        Args:
            layout: of the tensor, with its full shape.
            mesh: None for all of it.
            key: decides the random numbers, together with the number of the block.
        """
        zero = bool(layout.padding) or not layout.holds_values(mesh)
        make = torch.zeros if zero else torch.empty
        piece = make(layout.local_shape(mesh), dtype=self.dtype, device="cpu")
        if layout.holds_values(mesh):
            axes = [placed(ranges) for ranges in layout.segments(mesh)]
            generator = torch.Generator(device="cpu")
            scratch = torch.empty(min(_BLOCK, math.prod(self.shape)), dtype=self.dtype, device="cpu")
            for number, box in enumerate(blocks(self.shape)):
                self._fill(piece, axes, box, generator, f"{key}:{number}", scratch)
        return piece

    def _fill(
        self,
        piece: torch.Tensor,
        axes: list[list[tuple[int, int, int]]],
        box: Box,
        generator: torch.Generator,
        key: str,
        scratch: torch.Tensor,
    ) -> None:
        """Write what ``piece`` has of the block ``box``: in place where it is all there, in one stretch of memory."""
        parts = list(itertools.product(*(_shared(ranges, *own) for ranges, own in zip(axes, box, strict=True))))
        if not parts:
            return
        lengths = [length for _, length in box]
        if [length for _, _, length in parts[0]] == lengths:
            there = piece[tuple(slice(at, at + length) for at, _, length in parts[0])]
            if there.is_contiguous():
                self._run(there, box, generator, key)
                return
        block = scratch[: math.prod(lengths)].view(lengths)
        self._run(block, box, generator, key)
        for part in parts:
            there = piece[tuple(slice(at, at + length) for at, _, length in part)]
            there.copy_(block[tuple(slice(at, at + length) for _, at, length in part)])

    def _run(self, block: torch.Tensor, box: Box, generator: torch.Generator, key: str) -> None:
        if self.draw is not None:
            operation, numbers = self.draw
            generator.manual_seed(seed_of(key))
            operation(block, *numbers, generator=generator)
        for write in self.writes:
            write.apply(block, box)


def blocks(shape: tuple[int, ...]) -> Iterator[Box]:
    """The blocks of a tensor: each one stretch of its memory, of at most 65536 elements, and not across rows."""
    if 0 in shape:
        return
    axis = next((axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) <= _BLOCK), None)
    if axis is None:
        yield ()
        return
    step = _BLOCK // math.prod(shape[axis + 1 :])
    rest = tuple((0, extent) for extent in shape[axis + 1 :])
    for lead in itertools.product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], step):
            yield (*((index, 1) for index in lead), (start, min(step, shape[axis] - start)), *rest)


def seed_of(key: str) -> int:
    """A seed for torch's generators."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    start = max(one[0], other[0])
    return start, min(sum(one), sum(other)) - start


def _slices(part: list[tuple[int, int]], inside: Box) -> tuple[slice, ...]:
    return tuple(slice(a - b, a - b + length) for (a, length), (b, _) in zip(part, inside, strict=True))


def _shared(ranges: list[tuple[int, int, int]], start: int, length: int) -> list[tuple[int, int, int]]:
    """What a piece has of ``length`` elements from ``start``: ``(where in the piece, where among them, length)``."""
    found = []
    for at, first, extent in ranges:
        begin, common = _overlap((first, extent), (start, length))
        if common > 0:
            found.append((at + begin - first, begin - start, common))
    return found
