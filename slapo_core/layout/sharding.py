"""`Layout`: how the reference tensor of a parameter or buffer becomes local shards, and back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from slapo_core.errors import MeshError

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor.placement_types import Placement

    from slapo_core.layout.mesh import Mesh


class ShardRange(NamedTuple):
    """A range of a shard, in its elements, and its holders along ``mesh_dim``."""

    mesh_dim: str
    places: tuple[int, ...]
    axis: int
    start: int
    length: int

    def of(self, shard: torch.Tensor) -> torch.Tensor:
        """Return a view of the range."""
        return shard.narrow(self.axis, self.start, self.length)


class _Segment(NamedTuple):
    """A range of a reference tensor, and its holders along the mesh dimension of the last split."""

    start: int
    length: int
    places: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layout:
    """The layout of one parameter or buffer: its reference tensor, and how that is sharded.

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
        shard_counts: ``(mesh_dim, shards)`` where a split has at most so many shards, e.g. ``(("tp", 2),)`` for two KV
            heads: of more ranks, consecutive ones hold the same shard (see :meth:`holders`). Or the number for each
            matrix of the packing, None for one shard a rank: ``(("tp", (None, 2, 2)),)`` for fused queries, keys and
            values; a packing that repeats them, group by group, is split between the groups first.

    Raises:
        MeshError: a placement of another kind, or a mesh dimension that is partial and something else too.
    """

    origin: str
    shape: tuple[int, ...]
    placements: tuple[tuple[str, Placement], ...] = ()
    packing: tuple[tuple[int, tuple[int, ...]], ...] = ()
    padding: tuple[tuple[int, int], ...] = ()
    shard_counts: tuple[tuple[str, int | tuple[int | None, ...]], ...] = ()

    def __post_init__(self) -> None:
        if not self.placements:
            return
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

    def holders(self, mesh: Mesh | None, mesh_dim: str) -> tuple[int, ...]:
        """Return the places along a mesh dimension with this rank's shard, its own included.

        Of 8 ranks and 2 shards, ranks 0 to 3 hold the first one; all ranks hold what the dimension does not split.

        Raises:
            MeshError: the ranks cannot share the shards equally.
        """
        size, place = (mesh.size(mesh_dim), mesh.rank(mesh_dim)) if mesh is not None else (1, 0)
        if mesh_dim in self.partials():
            return (place,)
        found = [self._segments(mesh, mesh_dim)[axis] for one, axis in self.shards() if one == mesh_dim]
        return tuple(sorted(set(range(size)).intersection(*(one.places for ranges in found for one in ranges))))

    def parts(self, mesh: Mesh | None) -> list[ShardRange]:
        """Return the ranges of this rank's shard that differ in their holders; empty where none differ.

        Of a fused weight with fewer KV heads than ranks: the queries, and the keys and values.
        """
        for mesh_dim, axis in self.shards():
            ranges = self._segments(mesh, mesh_dim)[axis]
            if len({one.places for one in ranges}) > 1:
                starts = [sum(one.length for one in ranges[:index]) for index in range(len(ranges))]
                return [
                    ShardRange(mesh_dim, one.places, axis, start, one.length)
                    for start, one in zip(starts, ranges, strict=True)
                ]
        return []

    def holds_values(self, mesh: Mesh | None) -> bool:
        """Return whether this rank's shard has the reference values; other partial values are zeros.

        The first rank along each partial mesh dimension has the values, so that they add up to the reference tensors.
        """
        return mesh is None or all(mesh.rank(mesh_dim) == 0 for mesh_dim in self.partials())

    def segments(self, mesh: Mesh | None) -> list[list[tuple[int, int]]]:
        """This rank's ranges of the (padded) reference tensor: for each axis a list of ``(start, length)``.

        Raises:
            MeshError: an axis does not divide over the mesh; elements would be lost.
        """
        return [[(one.start, one.length) for one in ranges] for ranges in self._segments(mesh)]

    def _segments(self, mesh: Mesh | None, until: str | None = None) -> list[list[_Segment]]:
        """Return this rank's ranges for each axis, with their holders.

        Args:
            mesh: of the ranks.
            until: the last mesh dimension to split over; None: all.
        """
        padding, packing = dict(self.padding), dict(self.packing)
        found: list[list[_Segment]] = []
        for axis, extent in enumerate(self.shape):
            sizes = packing.get(axis, (extent + padding.get(axis, 0),))
            found.append([_Segment(sum(sizes[:index]), size) for index, size in enumerate(sizes)])
        for mesh_dim, axis in self.shards():
            place = mesh.rank(mesh_dim) if mesh is not None else 0
            found[axis] = self._split(found[axis], axis, mesh, mesh_dim, place)
            if mesh_dim == until:
                break
        return found

    def _split(self, ranges: list[_Segment], axis: int, mesh: Mesh | None, mesh_dim: str, place: int) -> list[_Segment]:
        """Return the ranges of the rank at a place along a mesh dimension, of given ranges."""
        size, first = mesh.size(mesh_dim) if mesh is not None else 1, 0
        given = dict(self.shard_counts).get(mesh_dim)
        counts = given if isinstance(given, tuple) else (given,) * len(ranges)
        groups = len(ranges) // len(counts)
        if groups > 1:
            self._check_shared(groups, size, mesh_dim)
            if size <= groups:
                own = ranges[place * len(ranges) // size : (place + 1) * len(ranges) // size]
                return [_Segment(own[0].start, sum(one.length for one in own), (place,))]
            size //= groups
            first = place - place % size
            ranges = ranges[first // size * len(counts) :][: len(counts)]
            counts = tuple(None if count is None else 1 for count in counts)
        found = []
        for one, count in zip(ranges, counts, strict=True):
            shards = size if count is None else min(size, count)
            self._check_shared(shards, size, mesh_dim)
            if one.length % shards:
                lengths = [each.length for each in ranges]
                into = f"mesh_dim '{mesh_dim}' of size {size}" if shards == size else f"{shards} shards"
                raise MeshError(
                    f"axis {axis} of '{self.origin}' (lengths {lengths}) is not divisible by {into}",
                    hint="pad it first, or split another axis",
                )
            held, length = size // shards, one.length // shards
            number = (place - first) // held
            places = tuple(range(first + number * held, first + (number + 1) * held))
            found.append(_Segment(one.start + number * length, length, places))
        return found

    def _check_shared(self, shards: int, size: int, mesh_dim: str) -> None:
        if size % shards and shards % size:
            raise MeshError(
                f"'{self.origin}' has {shards} shards along mesh_dim '{mesh_dim}', which do not divide its {size} "
                "ranks",
                hint=f"a {mesh_dim} size that {shards} divides",
            )

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
            a new tensor of shape ``shape`` on every rank; ``local`` itself where every rank has the full tensor.
        """
        tensor, layout = local.detach(), self
        while layout.placements:
            *kept, (mesh_dim, placement) = layout.placements
            if mesh is not None and mesh.size(mesh_dim) > 1:
                if placement.is_shard():
                    tensor = layout._gathered(tensor, mesh, mesh_dim, placement.dim)  # type: ignore[attr-defined]
                elif placement.is_partial():
                    tensor = _summed(tensor, mesh, mesh_dim)
            layout = replace(layout, placements=tuple(kept))
        return self._unpad(tensor)

    def _gathered(self, tensor: torch.Tensor, mesh: Mesh, mesh_dim: str, axis: int) -> torch.Tensor:
        """Gather a tensor over ``mesh_dim``, the mesh dimension of its last split."""
        import torch
        import torch.distributed as dist

        before = replace(self, placements=self.placements[:-1])._segments(mesh)[axis]
        ranges = [self._split(before, axis, mesh, mesh_dim, place) for place in range(mesh.size(mesh_dim))]
        shards = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in ranges]
        dist.all_gather(shards, tensor.contiguous(), group=mesh.group(mesh_dim))
        found: dict[int, torch.Tensor] = {}
        for own, shard in zip(ranges, shards, strict=True):
            for one, part in zip(own, shard.split([one.length for one in own], dim=axis), strict=True):
                found.setdefault(one.start, part)
        return torch.cat([found[start] for start in sorted(found)], dim=axis)

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
        parts += [f"at most {_counts(count)} shards along {mesh_dim}" for mesh_dim, count in self.shard_counts]
        parts += [f"padded by {elements} on axis {axis}" for axis, elements in self.padding]
        return ", ".join(parts)


def _counts(given: int | tuple[int | None, ...]) -> str:
    if not isinstance(given, tuple):
        return str(given)
    return f"({', '.join('all' if count is None else str(count) for count in given)})"


def _summed(tensor: torch.Tensor, mesh: Mesh, mesh_dim: str) -> torch.Tensor:
    """Sum over ``mesh_dim``, into new memory."""
    import torch
    import torch.distributed as dist

    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=mesh.group(mesh_dim))
    return total
