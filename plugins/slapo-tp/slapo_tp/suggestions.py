"""What may have been meant, where a split schedule is wrong: ``verify`` tries it on copies, and tells what helps."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast

from slapo_core import Change, Node, Primitive, Record, Suggestion
from slapo_core.spec.request import ScheduledModel
from slapo_tp.attributes import ShardAttribute
from slapo_tp.layers import layer_type_of
from slapo_tp.shard import Shard
from slapo_tp.splits import as_tuple, bias_is_left_out, output_state, own_tensor, split_axis
from slapo_tp.sync import Sync
from slapo_tp.sync_gradient import SyncGradient

__all__ = ["suggestions"]

Mode = Literal["fwd_pre", "fwd_post", "bwd_post", "forward", "backward"]

_SEQUENCE = 1  # the axis that sequence parallelism splits, if no step says otherwise


def suggestions(schedule: ScheduledModel, gradients: Sequence[str], mesh_dim: str) -> Iterator[Suggestion]:
    """Changes of the steps over ``mesh_dim``, and steps that may be missing; the more likely ones first."""
    assert schedule.mesh is not None
    nodes = list(schedule.root.walk())
    own = [record for record in schedule.records if getattr(record.primitive, "mesh_dim", None) == mesh_dim]
    if not own or schedule.mesh.size(mesh_dim) == 1:
        return
    yield from _whole_gradients(schedule.root, gradients, mesh_dim)
    if not gradients:
        yield from _reductions(nodes, mesh_dim)
        yield from _counts(nodes, mesh_dim)
    for record in own:
        if isinstance(record.primitive, Sync):
            yield from _other_syncs(schedule.root, record)
    yield from _input_gradients(nodes, mesh_dim)
    yield from _sequence(nodes, own, mesh_dim)
    for record in own:
        if isinstance(record.primitive, Shard):
            yield from _other_splits(schedule.root, record)
    if not gradients:
        yield from _partners(nodes, mesh_dim)


def _whole_gradients(root: Node, gradients: Sequence[str], mesh_dim: str) -> Iterator[Suggestion]:
    """Parameters that every rank has whole, but of whose gradient it sees a part."""
    by_path: dict[str, list[str]] = {}
    for full_name in gradients:
        path, _, name = full_name.rpartition(".")
        try:
            node: Node = root[path] if path else root
        except LookupError:
            continue
        if name in node.parameters and split_axis(node, name, mesh_dim) is None:
            left_out = name == "bias" and bias_is_left_out(node, mesh_dim)
            summed = any(
                isinstance(record.primitive, SyncGradient) and name in as_tuple(record.primitive.names)
                for record in node.records
            )
            if not left_out and not summed:
                by_path.setdefault(path, []).append(name)
    changes = [
        Change(path, SyncGradient(names[0] if len(names) == 1 else tuple(names), mesh_dim=mesh_dim))
        for path, names in by_path.items()
    ]
    if not changes:
        return
    if sum(map(len, by_path.values())) == len(gradients):
        yield Suggestion(tuple(changes), likely=True)
    if len(changes) > 1:
        yield from (Suggestion((change,)) for change in changes[:4])


def _reductions(nodes: Sequence[Node], mesh_dim: str) -> Iterator[Suggestion]:
    """Partial sums, and pieces of features, that no step at the module puts together."""
    missing = []
    for node in nodes:
        if output_state(node, mesh_dim) != "partial" or _syncs(node, "fwd_post"):
            continue
        missing.append(Change(node.path, Sync("fwd_post", "all_reduce", mesh_dim=mesh_dim)))
    if len(missing) > 1:
        yield Suggestion(tuple(missing), likely=True)
    for number, change in enumerate(missing):
        yield Suggestion((change,), likely=number < 2)
    for node in nodes:
        if output_state(node, mesh_dim) == "split" and not _syncs(node, "fwd_post"):
            kind = layer_type_of(node.module)
            axis = kind.feature_axis if kind is not None else -1
            yield Suggestion((Change(node.path, Sync("fwd_post", "all_gather", axis=axis, mesh_dim=mesh_dim)),))


def _input_gradients(nodes: Sequence[Node], mesh_dim: str) -> Iterator[Suggestion]:
    """Layers split on their output, whose input gets only a part of its gradient."""
    lacking = [
        node
        for node in nodes
        if output_state(node, mesh_dim) == "split"
        and (kind := layer_type_of(node.module)) is not None
        and kind.axis_of("input") is not None
        and not _syncs(node, "bwd_post", "fwd_pre")
    ]
    step = Sync("bwd_post", "all_reduce", mesh_dim=mesh_dim)
    for node in lacking:
        if not any(_syncs(around, "bwd_post", "fwd_pre") for around in _around(node, 2)):
            yield Suggestion((Change(node.path, step),))
    by_parent: dict[str, list[Node]] = {}
    for node in lacking:
        if node.parent is not None and not any(_syncs(around, "bwd_post", "fwd_pre") for around in _around(node, 2)):
            by_parent.setdefault(node.parent.path, []).append(node)
    for path, below in by_parent.items():
        if len(below) > 1:
            yield Suggestion(tuple(Change(node.path, step) for node in below))
            if path:
                yield Suggestion((Change(path, step),))


def _other_syncs(root: Node, record: Record) -> Iterator[Suggestion]:
    """The other collectives that may stand in a sync's place."""
    before = cast(Sync, record.primitive)
    node = _node(root, record.path)
    if node is None or callable(before.op):
        return
    forms: list[Sync] = []

    def form(mode: Mode, op: Any = None, *, axis: int = -1) -> None:
        inputs = before.inputs if mode in ("fwd_pre", "bwd_post") else None
        outputs = before.outputs if mode == "fwd_post" else None
        forms.append(Sync(mode, op, axis=axis, mesh_dim=before.mesh_dim, inputs=inputs, outputs=outputs))

    state = output_state(node, before.mesh_dim)
    if state != "partial":
        form("bwd_post", "all_reduce")
        form("fwd_pre", "all_gather", axis=_SEQUENCE)
    if state != "split":
        form("fwd_post", "all_reduce")
        form("fwd_post", "reduce_scatter", axis=_SEQUENCE)
    if before.op in ("all_gather", "reduce_scatter"):
        for axis in (0, 1, -1):
            if before.mode in ("fwd_pre", "fwd_post"):
                form(before.mode, before.op, axis=axis)
    if state == "split":
        form("fwd_post", "all_gather")
    for other in dict.fromkeys(forms):
        if other != before:
            yield Suggestion((Change(record.path, other, instead_of=record),))


def _sequence(nodes: Sequence[Node], own: Sequence[Record], mesh_dim: str) -> Iterator[Suggestion]:
    """Where some steps gather or scatter along an axis: layers without such a step."""
    axes = {
        record.primitive.axis
        for record in own
        if isinstance(record.primitive, Sync) and record.primitive.op in ("all_gather", "reduce_scatter")
    } - {-1}
    for axis in sorted(axes):
        for node in nodes:
            state = output_state(node, mesh_dim)
            if state == "split" and not _syncs(node, "fwd_pre", "bwd_post"):
                yield Suggestion((Change(node.path, Sync("fwd_pre", "all_gather", axis=axis, mesh_dim=mesh_dim)),))
            if state == "partial" and not _syncs(node, "fwd_post"):
                step = Sync("fwd_post", "reduce_scatter", axis=axis, mesh_dim=mesh_dim)
                yield Suggestion((Change(node.path, step),), likely=True)


def _other_splits(root: Node, record: Record) -> Iterator[Suggestion]:
    """The other ways to split the same tensor."""
    before = cast(Shard, record.primitive)
    node = _node(root, record.path)
    kind = layer_type_of(node.module) if node is not None else None
    if node is None or kind is None or "weight" not in as_tuple(before.names) or own_tensor(node, "weight") is None:
        return

    def write(**changes: Any) -> Suggestion:
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
    if wide % 3 == 0 and wide // 3 == other:
        yield 3
    elif other < wide < 3 * other and (wide - other) % 2 == 0:
        yield (other, (wide - other) // 2, (wide - other) // 2)
    elif wide % 2 == 0 and wide > other:
        yield 2


def _counts(nodes: Sequence[Node], mesh_dim: str) -> Iterator[Suggestion]:
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
            yield Suggestion((Change(node.path, _attribute(names, mesh_dim)),), likely=len(names) == len(heads + sizes))


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


def _partners(nodes: Sequence[Node], mesh_dim: str) -> Iterator[Suggestion]:
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


def _syncs(node: Node, *modes: str) -> bool:
    forms = {"forward": "fwd_post", "backward": "bwd_post"}
    return any(
        isinstance(record.primitive, Sync) and forms.get(record.primitive.mode, record.primitive.mode) in modes
        for record in node.records
    )


def _around(node: Node, levels: int) -> Iterator[Node]:
    around = node.parent
    while around is not None and levels:
        yield around
        around, levels = around.parent, levels - 1


def _node(root: Node, path: str) -> Node | None:
    try:
        return cast(Node, root[path]) if path else root
    except LookupError:
        return None
