"""Where a parameter's local piece lies in the untouched model's tensor: the one record that everybody reads.

Materialising, state dicts, checkpoints, ``verify`` and the dialects all use the functions below, so that there is one
place that knows how a full tensor becomes a local one and back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slapo_core.errors import MeshError

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor.placement_types import Placement

    from slapo_core.spec.mesh import Mesh

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """The layout of one parameter or buffer.

    Args:
        origin: its name in the untouched model, e.g. ``"encoder.layer.0.output.dense.weight"``; ``""`` for a tensor
            that the schedule added.
        shape: its shape in the untouched model, in elements, e.g. ``(768, 3072)``.
        placements: ``(mesh_dim, placement)`` with torch's own placement types, in the order in which they were
            applied, e.g. ``(("tp", Shard(0)),)``; a mesh dimension that is not named holds a replica.
        packing: ``(axis, sizes)`` for an axis that holds several matrices one after the other, e.g.
            ``((1, (768, 768, 768)),)`` for a fused query-key-value weight: each is split by itself.
        padding: ``(axis, elements)`` of zeros appended to the untouched tensor before it is split.
    """

    origin: str
    shape: tuple[int, ...]
    placements: tuple[tuple[str, Placement], ...] = ()
    packing: tuple[tuple[int, tuple[int, ...]], ...] = ()
    padding: tuple[tuple[int, int], ...] = ()

    @property
    def is_sharded(self) -> bool:
        return any(placement.is_shard() for _, placement in self.placements)

    def shards(self) -> tuple[tuple[str, int], ...]:
        """``(mesh_dim, axis)`` of every split, in the order applied, e.g. ``(("tp", 0),)``."""
        return tuple((mesh_dim, p.dim) for mesh_dim, p in self.placements if p.is_shard())  # type: ignore[attr-defined]

    def segments(self, mesh: Mesh | None) -> list[list[tuple[int, int]]]:
        """This rank's ranges of the (padded) untouched tensor: for each axis a list of ``(start, length)``.

        Raises:
            MeshError: an axis does not divide over the mesh; elements would be lost.
        """
        padding, packing = dict(self.padding), dict(self.packing)
        ranges: list[list[tuple[int, int]]] = []
        for axis, extent in enumerate(self.shape):
            sizes = packing.get(axis, (extent + padding.get(axis, 0),))
            starts = [sum(sizes[:index]) for index in range(len(sizes))]
            ranges.append(list(zip(starts, sizes, strict=True)))
        for mesh_dim, axis in self.shards():
            world_size, place = (mesh.size(mesh_dim), mesh.rank(mesh_dim)) if mesh else (1, 0)
            if any(length % world_size for _, length in ranges[axis]):
                lengths = [length for _, length in ranges[axis]]
                raise MeshError(
                    f"axis {axis} of '{self.origin}', in pieces of {lengths} elements, does not divide over mesh_dim "
                    f"'{mesh_dim}' of size {world_size}",
                    hint="pad it first, or split another axis",
                )
            ranges[axis] = [
                (start + place * (length // world_size), length // world_size) for start, length in ranges[axis]
            ]
        return ranges

    def local_shape(self, mesh: Mesh | None) -> tuple[int, ...]:
        """The shape of this rank's piece, in elements."""
        return tuple(sum(length for _, length in ranges) for ranges in self.segments(mesh))

    def local(self, full: torch.Tensor, mesh: Mesh | None) -> torch.Tensor:
        """This rank's piece of the untouched tensor ``full``, as new contiguous memory."""
        import torch

        piece = self._pad(full)
        for axis, ranges in enumerate(self.segments(mesh)):
            if ranges == [(0, piece.shape[axis])]:
                continue
            parts = [piece.narrow(axis, start, length) for start, length in ranges]
            piece = parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)
        return piece.detach().clone(memory_format=torch.contiguous_format)

    def full(self, local: torch.Tensor, mesh: Mesh | None) -> torch.Tensor:
        """The untouched tensor, gathered from every rank's piece: a collective over the sharded mesh dimensions.

        Args:
            local: this rank's piece, of shape ``local_shape(mesh)``.

        Returns:
            a new tensor of shape ``shape`` on every rank; ``local`` itself where nothing is sharded.
        """
        import torch
        import torch.distributed as dist

        tensor, layout = local.detach(), self
        for mesh_dim, axis in reversed(self.shards()):
            if mesh is None or mesh.size(mesh_dim) == 1:
                continue
            lengths = [length for _, length in layout.segments(mesh)[axis]]
            pieces = [
                torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(mesh.size(mesh_dim))
            ]
            dist.all_gather(pieces, tensor.contiguous(), group=mesh.group(mesh_dim))
            parts = [piece.split(lengths, dim=axis) for piece in pieces]
            tensor = torch.cat([part[index] for index in range(len(lengths)) for part in parts], dim=axis)
            layout = layout._without(mesh_dim, axis)
        return self._unpad(tensor)

    def _without(self, mesh_dim: str, axis: int) -> Layout:
        kept = tuple(
            (name, p)
            for name, p in self.placements
            if not (name == mesh_dim and p.is_shard() and p.dim == axis)  # type: ignore[attr-defined]
        )
        return Layout(self.origin, self.shape, kept, self.packing, self.padding)

    def _pad(self, full: torch.Tensor) -> torch.Tensor:
        import torch

        for axis, elements in self.padding:
            shape = list(full.shape)
            shape[axis] = elements
            full = torch.cat([full, full.new_zeros(shape)], dim=axis)
        return full

    def _unpad(self, full: torch.Tensor) -> torch.Tensor:
        for axis, _ in self.padding:
            full = full.narrow(axis, 0, self.shape[axis])
        return full

    def __str__(self) -> str:
        if not self.placements:
            return "replicated"
        parts = [f"{mesh_dim}: {placement}" for mesh_dim, placement in self.placements]
        parts += [f"packed {sizes} on axis {axis}" for axis, sizes in self.packing]
        return ", ".join(parts)
