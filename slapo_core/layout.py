"""The layout of a sharded tensor: how its full reference tensor becomes local shards, and back.

Materialization, state dicts, checkpoints, ``verify`` and the dialects all use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slapo_core.errors import MeshError

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor.placement_types import Placement

    from slapo_core.mesh import Mesh

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """The layout of one parameter or buffer.

    Args:
        origin: its name in the reference model, e.g. ``"encoder.layer.0.output.dense.weight"``; ``""`` for a tensor
            that the schedule added.
        shape: its shape in the reference model, in elements, e.g. ``(768, 3072)``.
        placements: ``(mesh_dim, placement)`` with torch's own placement types, in the order in which they were
            applied, e.g. ``(("tp", Shard(0)),)``; a mesh dimension that is not named holds a replica. ``Partial()``:
            the tensors along the mesh dimension add up to the reference tensor.
        packing: ``(axis, sizes)`` for an axis that holds several matrices one after the other, e.g.
            ``((1, (768, 768, 768)),)`` for a fused query-key-value weight: each is split by itself.
        padding: ``(axis, elements)`` of zeros appended to the reference tensor before it is split.

    Raises:
        MeshError: a placement of another kind, or a mesh dimension that is partial and something else too.
    """

    origin: str
    shape: tuple[int, ...]
    placements: tuple[tuple[str, Placement], ...] = ()
    packing: tuple[tuple[int, tuple[int, ...]], ...] = ()
    padding: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for mesh_dim, placement in self.placements:
            is_sum = placement.is_partial() and placement.reduce_op == "sum"  # type: ignore[attr-defined]
            if not (placement.is_shard() or placement.is_replicate() or is_sum):
                raise MeshError(
                    f"unsupported placement of '{self.origin}' along mesh_dim '{mesh_dim}': {placement!r}",
                    hint="a tensor is Shard(axis), Replicate() or Partial('sum') along a mesh dimension",
                )
        dims = [mesh_dim for mesh_dim, _ in self.placements]
        for mesh_dim in self.partials():
            if dims.count(mesh_dim) > 1:
                raise MeshError(
                    f"'{self.origin}' is a partial sum along mesh_dim '{mesh_dim}', and cannot be "
                    f"{self} at the same time",
                    hint="reduce it before it is split",
                )

    @property
    def is_sharded(self) -> bool:
        """Whether this rank holds only a shard of the reference tensor."""
        return any(placement.is_shard() for _, placement in self.placements)

    def shards(self) -> tuple[tuple[str, int], ...]:
        """``(mesh_dim, axis)`` of every split, in the order applied, e.g. ``(("tp", 0),)``."""
        return tuple((mesh_dim, p.dim) for mesh_dim, p in self.placements if p.is_shard())  # type: ignore[attr-defined]

    def partials(self) -> tuple[str, ...]:
        """Return the mesh dimensions with partial values, in the order applied."""
        return tuple(mesh_dim for mesh_dim, placement in self.placements if placement.is_partial())

    def holds_values(self, mesh: Mesh | None) -> bool:
        """Return whether this rank's shard has the reference values; of partial values, all but one are zeros.

        The first rank along each partial mesh dimension has the values, so that they add up to the reference tensors.
        """
        return mesh is None or all(mesh.rank(mesh_dim) == 0 for mesh_dim in self.partials())

    def segments(self, mesh: Mesh | None) -> list[list[tuple[int, int]]]:
        """This rank's ranges of the (padded) reference tensor: for each axis a list of ``(start, length)``.

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
                    f"axis {axis} of '{self.origin}' (lengths {lengths}) is not divisible by mesh_dim '{mesh_dim}' of "
                    f"size {world_size}",
                    hint="pad it first, or split another axis",
                )
            ranges[axis] = [
                (start + place * (length // world_size), length // world_size) for start, length in ranges[axis]
            ]
        return ranges

    def local_shape(self, mesh: Mesh | None) -> tuple[int, ...]:
        """The shape of this rank's shard, in elements."""
        return tuple(sum(length for _, length in ranges) for ranges in self.segments(mesh))

    def local(self, full: torch.Tensor, mesh: Mesh | None) -> torch.Tensor:
        """Cut this rank's shard from the full tensor, as new contiguous memory.

        Of a partial sum, the first rank along the mesh dimension gets the values, and the others zeros.
        """
        import torch

        shard = self._pad(full)
        for axis, ranges in enumerate(self.segments(mesh)):
            if ranges == [(0, shard.shape[axis])]:
                continue
            parts = [shard.narrow(axis, start, length) for start, length in ranges]
            shard = parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)
        if not self.holds_values(mesh):
            return torch.zeros_like(shard.detach(), memory_format=torch.contiguous_format)
        return shard.detach().clone(memory_format=torch.contiguous_format)

    def full(self, local: torch.Tensor, mesh: Mesh | None) -> torch.Tensor:
        """Gather the full tensor from all shards: a collective over the sharded and partial mesh dimensions.

        Args:
            local: this rank's shard, of shape ``local_shape(mesh)``; or its partial value.

        Returns:
            a new tensor of shape ``shape`` on every rank; ``local`` itself where every rank has the whole tensor.
        """
        tensor, layout = local.detach(), self
        while layout.placements:
            *kept, (mesh_dim, placement) = layout.placements
            if mesh is not None and mesh.size(mesh_dim) > 1:
                if placement.is_shard():
                    tensor = layout._gathered(tensor, mesh, mesh_dim, placement.dim)  # type: ignore[attr-defined]
                elif placement.is_partial():
                    tensor = _summed(tensor, mesh, mesh_dim)
            layout = Layout(self.origin, self.shape, tuple(kept), self.packing, self.padding)
        return self._unpad(tensor)

    def _gathered(self, tensor: torch.Tensor, mesh: Mesh, mesh_dim: str, axis: int) -> torch.Tensor:
        """The tensor before its last split, which was over ``mesh_dim``."""
        import torch
        import torch.distributed as dist

        lengths = [length for _, length in self.segments(mesh)[axis]]
        shards = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(mesh.size(mesh_dim))]
        dist.all_gather(shards, tensor.contiguous(), group=mesh.group(mesh_dim))
        parts = [shard.split(lengths, dim=axis) for shard in shards]
        return torch.cat([part[index] for index in range(len(lengths)) for part in parts], dim=axis)

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
        parts += [f"padded by {elements} on axis {axis}" for axis, elements in self.padding]
        return ", ".join(parts)


def _summed(tensor: torch.Tensor, mesh: Mesh, mesh_dim: str) -> torch.Tensor:
    """The sum over ``mesh_dim``, as new memory."""
    import torch
    import torch.distributed as dist

    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=mesh.group(mesh_dim))
    return total
