"""Other splits that may have been meant: another axis or packing, a layer that is whole still, counts not divided."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, cast

from slapo_core import Change, Node, Primitive, Record, Suggestion
from slapo_tp.attributes import ShardAttribute
from slapo_tp.layers import layer_type_of
from slapo_tp.shard import Shard
from slapo_tp.splits import as_tuple, output_state, own_tensor, split_axis, split_together

__all__ = ["counts", "other_splits", "partners", "statistics"]

_FUSED = ("qkv", "query_key_value", "attn", "in_proj")  # names of queries, keys and values in one matrix
_TWO_IN_ONE = ("gate_up", "Wi", "kv", "key_value")


def other_splits(node: Node, record: Record) -> Iterator[Suggestion]:
    """The other ways to split the same tensor."""
    before = cast(Shard, record.primitive)
    kind = layer_type_of(node.module)
    if kind is None or "weight" not in as_tuple(before.names) or own_tensor(node, "weight") is None:
        return

    def write(**changes: Any) -> Suggestion:
        changes = {"pad": before.pad and "axis" not in changes, **changes}
        return Suggestion((Change(record.path, dataclasses.replace(before, **changes), instead_of=record),))

    has_bias = own_tensor(node, "bias") is not None
    output, into = kind.axis_of("output"), kind.axis_of("input")
    if before.axis % len(node.layout("weight").shape) == output:
        if has_bias and "bias" not in as_tuple(before.names):
            yield write(names=("weight", "bias"))
        yield from (write(packed=packed) for packed in _packings(node, output) if packed != before.packed)
        if into is not None:
            yield write(names="weight", axis=into, packed=1)
    elif output is not None:
        yield write(names=("weight", "bias") if has_bias else "weight", axis=output, packed=1)
        yield from (
            write(names=("weight", "bias") if has_bias else "weight", axis=output, packed=packed)
            for packed in _packings(node, output)
            if packed != 1
        )


def _packings(node: Node, axis: int | None) -> Iterator[int | tuple[int, ...]]:
    """One matrix, or queries, keys and values one after the other, of one size or of two."""
    shape = node.layout("weight").shape
    assert axis is not None
    wide, other = shape[axis], shape[1 - axis] if len(shape) == 2 else 0
    yield 1
    if len(shape) != 2:
        return
    name = node.path.rpartition(".")[2]
    if wide % 3 == 0 and wide // 3 == other:
        yield 3
    elif any(part in name for part in _FUSED) and other < wide < 3 * other and (wide - other) % 2 == 0:
        yield (other, (wide - other) // 2, (wide - other) // 2)
    elif any(part in name for part in _TWO_IN_ONE) and wide % 2 == 0:
        yield 2


def counts(nodes: Sequence[Node], mesh_dim: str) -> Iterator[Suggestion]:
    """Counts of heads, and sizes, that follow the pieces which the children hold."""
    for node in nodes:
        extents = {
            child.layout("weight").shape[axis]
            for child in node.children
            if (axis := split_axis(child, "weight", mesh_dim)) is not None and output_state(child, mesh_dim) == "split"
        }
        extents |= {extent // 3 for extent in extents if extent % 3 == 0}
        if not extents or layer_type_of(node.module) is not None:
            continue
        divided = {
            name
            for record in node.records
            if isinstance(record.primitive, ShardAttribute) and record.primitive.mesh_dim == mesh_dim
            for name in as_tuple(record.primitive.names)
        }
        size = node.mesh.size(mesh_dim) if node.mesh is not None else 1
        numbers = {
            name: value
            for name, value in vars(node.module).items()
            if type(value) is int
            and value > 1
            and value % size == 0
            and name not in divided
            and not name.startswith("_")
        }
        sizes = [name for name, value in numbers.items() if value in extents]
        heads = [name for name in numbers if _counts_heads(name)]
        for names in _choices(heads, sizes):
            yield Suggestion(
                (Change(node.path, _attribute(names, mesh_dim)),),
                likely=not divided and len(names) == len(heads + sizes),
            )


def _counts_heads(name: str) -> bool:
    """Whether a name is that of a number of heads, and not of the size of one."""
    return "head" in name and not any(part in name for part in ("dim", "size", "group"))


def _choices(heads: Sequence[str], sizes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    names = (*heads, *sizes)
    sets = [names, tuple(heads), tuple(sizes), *((name,) for name in names), *itertools.combinations(names, 2)]
    if len(names) == 4:
        sets += itertools.combinations(names, 3)
    yield from dict.fromkeys(choice for choice in sets if choice)


def _attribute(names: tuple[str, ...], mesh_dim: str) -> Primitive:
    return ShardAttribute(names[0] if len(names) == 1 else names, mesh_dim=mesh_dim)


def partners(nodes: Sequence[Node], mesh_dim: str) -> Iterator[Suggestion]:
    """Layers beside split ones that are whole still."""
    for node in nodes:
        kind, bias = layer_type_of(node.module), own_tensor(node, "bias")
        has_weight = kind is not None and own_tensor(node, "weight") is not None
        own = "weight" if has_weight else "bias"
        if not has_weight and (bias is None or bias.dim() != 1):
            continue
        if split_axis(node, own, mesh_dim) is not None or not _has_split_beside(node, mesh_dim):
            continue
        axes = (kind.axis_of("output"), kind.axis_of("input")) if kind is not None and has_weight else (0,)
        for number, axis in enumerate(axes):
            names = ("weight", "bias") if number == 0 and has_weight and bias is not None else own
            if axis is not None:
                yield Suggestion((Change(node.path, Shard(names, axis=axis, mesh_dim=mesh_dim), first=True),))


def statistics(nodes: Sequence[Node], mesh_dim: str) -> Iterator[Suggestion]:
    """Split norms of channels with all of their tensors, running statistics too: those of one name together."""
    by_name: dict[str, list[Change]] = {}
    for node in nodes:
        names = split_together(node)
        if not names or output_state(node, mesh_dim) == "split" or not _has_split_beside(node, mesh_dim):
            continue
        step = Shard(names, axis=0, mesh_dim=mesh_dim)
        by_name.setdefault(node.path.rpartition(".")[2], []).append(Change(node.path, step))
    for changes in by_name.values():
        yield Suggestion(tuple(changes), likely=True)
        yield from (Suggestion((change,)) for change in changes if len(changes) > 1)


def _has_split_beside(node: Node, mesh_dim: str) -> bool:
    around = node.parent
    for _ in range(2):
        if around is None:
            return False
        if any(
            split_axis(below, "weight", mesh_dim) is not None
            for child in around.children
            for below in (child, *child.children)
            if below.path != node.path
        ):
            return True
        around = around.parent
    return False
