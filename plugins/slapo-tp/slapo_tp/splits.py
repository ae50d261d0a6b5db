"""Resolve the arguments of ``shard`` for one tensor: `Split`, and its arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slapo_core import Layout, Node, Violation
from slapo_tp.layers import layer_type_of
from slapo_tp.split_state import mesh_size, own_tensor

Packed = int | tuple[int, ...]
Shards = int | tuple[int | None, ...] | None


@dataclass(frozen=True)
class Split:
    """Describe the split of one tensor along one axis.

    Args:
        name: of the tensor in its module.
        axis: of the tensor, from 0.
        extent: elements of that axis.
        mesh_dim: the mesh dimension to split over.
        ranks: the number of ranks along it.
        packed: as of ``shard``.
        pad: as of ``shard``.
        shards: as of ``shard``.
    """

    name: str
    axis: int
    extent: int
    mesh_dim: str
    ranks: int
    packed: Packed = 1
    pad: bool = False
    shards: Shards = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the sizes of the matrices along the axis."""
        return packed_sizes(self.packed, self.extent, self.shards)

    @property
    def counts(self) -> tuple[int | None, ...]:
        """Return the number of shards of each matrix; None: one shard a rank."""
        return self.shards if isinstance(self.shards, tuple) else (self.shards,) * len(self.sizes)

    def layout(self, shape: tuple[int, ...], before: Layout) -> Layout:
        """Return the layout of this split alone.

        Args:
            shape: of the tensor before.
            before: its layout.
        """
        from torch.distributed.tensor import Shard as ShardPlacement  # brings sympy along

        missing = -self.extent % self.ranks if self.pad else 0
        return Layout(
            before.origin,
            shape,
            placements=((self.mesh_dim, ShardPlacement(self.axis)),),
            packing=((self.axis, self.sizes),) if len(self.sizes) > 1 else (),
            padding=((self.axis, missing),) if missing else (),
            shard_counts=((self.mesh_dim, self.shards),) if self.shards is not None else (),
        )


def packed_sizes(packed: Packed, extent: int, shards: Shards = None) -> tuple[int, ...]:
    """Return the matrices' sizes along an axis: ``packed_sizes(3, 768) == (256, 256, 256)``.

    With ``shards`` for each matrix, ``packed`` may be one of as many groups as there are shards.
    """
    if not isinstance(packed, tuple):
        return (extent // packed,) * packed
    groups = common_count(shards) if isinstance(shards, tuple) else None
    return packed * groups if groups and sum(packed) * groups == extent else packed


def common_count(shards: Shards) -> int | None:
    """Return the number of shards of shared matrices; None: one shard a rank."""
    return next((count for count in shards if count is not None), None) if isinstance(shards, tuple) else shards


def ranks_per_shard(ranks: int, shards: Shards) -> int:
    """Return the number of ranks with the same shard, or the same keys and values."""
    count = common_count(shards)
    return 1 if count is None else max(1, ranks // count)


def counts_violations(shards: Shards, packed: Packed) -> Iterator[Violation]:
    """Refuse ``shards`` that do not fit the packed matrices, or that differ."""
    if not isinstance(shards, tuple):
        return
    matrices = len(packed) if isinstance(packed, tuple) else packed
    if len(shards) != matrices or matrices < 2:
        yield Violation(
            f"shards={shards} is for {len(shards)} packed matrices (got packed={packed})",
            "one number of shards for each packed matrix, None for one shard a rank: packed=(64, 16, 16), "
            "shards=(None, 2, 2)",
        )
    elif len({count for count in shards if count is not None}) != 1:
        yield Violation(
            f"shards={shards} must have one number, that of the KV heads, and None for one shard a rank",
            "e.g. shards=(None, 2, 2) for queries, keys and values",
        )


def shards_violations(node: Node, mesh_dim: str, shards: int | None, argument: str) -> Iterator[Violation]:
    """Refuse a number of shards that the ranks cannot hold evenly."""
    size = mesh_size(node, mesh_dim)
    if shards is not None and shards < 1:
        yield Violation(f"{argument} must be positive (got {shards})", f"leave {argument} out for one shard a rank")
    elif shards is not None and size % shards and shards % size:
        yield Violation(
            f"{argument}={shards} and {mesh_dim} size {size}: neither divides the other",
            f"a {mesh_dim} size that divides {shards}, or a multiple of it",
        )


def tensor_axis(node: Node, name: str, names: tuple[str, ...], axis: int) -> int | None:
    """Return the axis of a tensor that ``shard(names, axis=axis)`` means; None if missing.

    ``axis`` counts the axes of the weight. A bias has only one axis, that of the output features, so it is split on its
    axis 0 when the weight is split on its output axis, whichever that is (1 for transformers' Conv1D).
    """
    tensor = own_tensor(node, name)
    assert tensor is not None
    kind = layer_type_of(node.module)
    weight = own_tensor(node, kind.weight) if kind is not None else None
    along_weight = (kind is not None and kind.weight in names) or not -1 <= axis < 1
    if name == "bias" and tensor.dim() == 1 and kind is not None and weight is not None and along_weight:
        position = _from_front(axis, weight.dim())
        return 0 if position is not None and kind.role(position) in ("output", "channel") else None
    return _from_front(axis, tensor.dim())


def _from_front(axis: int, axes: int) -> int | None:
    return axis % axes if -axes <= axis < axes else None
