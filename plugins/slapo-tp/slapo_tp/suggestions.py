"""What may have been meant, where a split schedule is wrong: ``verify`` tries it on copies, and tells what helps."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, cast

from slapo_core import Change, Node, Record, Suggestion
from slapo_core.spec.request import ScheduledModel
from slapo_tp.layers import layer_type_of
from slapo_tp.shard import Shard
from slapo_tp.splits import as_tuple, bias_is_left_out, makes_gradient_partial, output_state, sites, split_axis
from slapo_tp.suggested_splits import counts, other_splits, partners, statistics
from slapo_tp.sync import Sync
from slapo_tp.sync_gradient import SyncGradient

__all__ = ["suggestions"]

Mode = Literal["fwd_pre", "fwd_post", "bwd_post", "forward", "backward"]


def suggestions(schedule: ScheduledModel, gradients: Sequence[str], mesh_dim: str) -> Iterator[Suggestion]:
    """Changes of the steps over ``mesh_dim``, and steps that may be missing; the more likely ones first."""
    assert schedule.mesh is not None
    nodes = list(schedule.root.walk())
    own = [record for record in schedule.records if getattr(record.primitive, "mesh_dim", None) == mesh_dim]
    if not own or schedule.mesh.size(mesh_dim) == 1:
        return
    syncs = [record for record in own if isinstance(record.primitive, Sync)]
    splits = [record for record in own if isinstance(record.primitive, Shard)]
    backward = [record for record in syncs if cast(Sync, record.primitive).mode in ("bwd_post", "backward")]
    forward = [record for record in syncs if record not in backward]
    axes = _sequence_axes(syncs)
    others = functools.partial(_other_syncs, axes=axes)
    if gradients:
        reducing = [record for record in backward if cast(Sync, record.primitive).op in (None, "all_reduce")]
        yield from _whole_gradients(schedule.root, gradients, mesh_dim)
        yield from _doubled(reducing, own, gradients)
        yield from _input_gradients(nodes, mesh_dim)
        yield from _inside_residuals(schedule.root, reducing, mesh_dim)
        yield from _each(others, schedule.root, [*backward, *forward])
        yield from _sequence(nodes, axes, mesh_dim)
        yield from _each(other_splits, schedule.root, splits)
    else:
        yield from _reductions(nodes, mesh_dim)
        yield from statistics(nodes, mesh_dim)
        yield from counts(nodes, mesh_dim)
        yield from _sequence(nodes, axes, mesh_dim)
        yield from _each(others, schedule.root, forward)
        yield from _each(other_splits, schedule.root, splits)
        yield from partners(nodes, mesh_dim)
        yield from _each(others, schedule.root, backward)


def _each(
    others: Callable[[Node, Record], Iterator[Suggestion]], root: Node, records: Sequence[Record]
) -> Iterator[Suggestion]:
    for record in records:
        try:
            node = cast(Node, root[record.path]) if record.path else root
        except LookupError:
            continue  # it went with a module around it
        yield from others(node, record)


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


def _doubled(reducing: Sequence[Record], own: Sequence[Record], gradients: Sequence[str]) -> Iterator[Suggestion]:
    """Leave out sums of gradients that are whole already, and one of two reductions on a way."""
    summed = [
        record
        for record in own
        if isinstance(record.primitive, SyncGradient)
        and any(f"{record.path}.{name}".lstrip(".") in gradients for name in as_tuple(record.primitive.names))
    ]
    inner = [record for record in reducing if any(_is_below(record, other) for other in reducing)]
    outer = [record for record in reducing if any(_is_below(other, record) for other in reducing)]
    for records in (summed, inner, outer):
        blocks: dict[str, list[Change]] = {}
        for record in records:
            block = re.match(r".*\.\d+(?=\.|$)", record.path)
            blocks.setdefault(block[0] if block else "", []).append(Change(record.path, instead_of=record))
        for number, changes in enumerate(blocks.values()):  # verify tries the same in all repeated blocks
            yield Suggestion(tuple(changes), likely=not number)
            yield from (Suggestion((change,)) for change in changes[:4] if len(changes) > 1)


def _is_below(record: Record, other: Record) -> bool:
    return record.path != other.path and (not other.path or record.path.startswith(f"{other.path}."))


def _inside_residuals(root: Node, reducing: Sequence[Record], mesh_dim: str) -> Iterator[Suggestion]:
    """Reductions at a module with split layers in it, moved to these: its input may flow around them, too."""
    seen: set[str] = set()
    for record in reducing:
        try:
            node: Node = root[record.path] if record.path else root
        except LookupError:
            continue  # it went with a module around it
        layers = [below for below in node.walk() if makes_gradient_partial(below, mesh_dim)]
        around = [
            child for child in node.children if any(f"{below.path}.".startswith(f"{child.path}.") for below in layers)
        ]
        if node in layers or not layers:
            continue
        alike = re.sub(r"\d+", "*", record.path)
        for places in (around, layers) if around != layers else (layers,):
            added = [
                Change(place.path, Sync("bwd_post", "all_reduce", mesh_dim=mesh_dim))
                for place in places
                if not _syncs(place, "bwd_post")
            ]
            yield Suggestion((Change(record.path, instead_of=record), *added), likely=alike not in seen)
        seen.add(alike)


def _reductions(nodes: Sequence[Node], mesh_dim: str) -> Iterator[Suggestion]:
    """Partial sums, and pieces of features, that no step at the module puts together."""
    missing = []
    for node in nodes:
        if output_state(node, mesh_dim) != "partial":
            continue
        if any(_syncs(place, "fwd_post") for place, _ in sites(node, "weight")):
            continue  # one that is tied, and perhaps never called
        missing.append(Change(node.path, Sync("fwd_post", "all_reduce", mesh_dim=mesh_dim)))
    if len(missing) > 1:
        yield Suggestion(tuple(missing), likely=True)
    for number, change in enumerate(missing):
        yield Suggestion((change,), likely=number < 2)
    for path in [change.path for change in missing][:2]:  # or the tensor was to be split along another axis
        for node in (each for each in nodes if each.path == path):
            for record in (each for each in node.records if isinstance(each.primitive, Shard)):
                yield from (dataclasses.replace(each, likely=True) for each in other_splits(node, record))
    for node in nodes:
        if output_state(node, mesh_dim) == "split" and not _syncs(node, "fwd_post") and not _feeds(node, mesh_dim):
            kind = layer_type_of(node.module)
            axis = kind.feature_axis if kind is not None else -1
            yield Suggestion((Change(node.path, Sync("fwd_post", "all_gather", axis=axis, mesh_dim=mesh_dim)),))


def _feeds(node: Node, mesh_dim: str) -> bool:
    """Whether a layer beside this one takes pieces, as its own output is."""
    around = node.parent
    below = [] if around is None else [each for child in around.children for each in (child, *child.children)]
    kinds = [(each, layer_type_of(each.module)) for each in below if output_state(each, mesh_dim) == "partial"]
    return any(kind is not None and kind.axis_of("input") is not None for _, kind in kinds)


def _open_inputs(nodes: Sequence[Node], mesh_dim: str) -> list[Node]:
    """Layers split on their output at, or around, whose input no step does anything."""
    return [
        node
        for node in nodes
        if makes_gradient_partial(node, mesh_dim)
        and not any(_syncs(place, "bwd_post", "fwd_pre") for place in (node, *_around(node, 2)))
    ]


def _input_gradients(nodes: Sequence[Node], mesh_dim: str) -> Iterator[Suggestion]:
    """Layers split on their output, whose input gets only a part of its gradient."""
    step = Sync("bwd_post", "all_reduce", mesh_dim=mesh_dim)
    lacking = _open_inputs(nodes, mesh_dim)
    yield from (Suggestion((Change(node.path, step),), likely=True) for node in lacking)
    for parent, below in _by_parent(lacking):
        yield Suggestion(tuple(Change(node.path, step) for node in below), likely=True)
        yield Suggestion((Change(parent.path, step),))


def _by_parent(nodes: Sequence[Node]) -> list[tuple[Node, list[Node]]]:
    """The modules that hold several of the nodes."""
    found: dict[str, tuple[Node, list[Node]]] = {}
    for node in nodes:
        if node.parent is not None:
            found.setdefault(node.parent.path, (node.parent, []))[1].append(node)
    return [(parent, below) for parent, below in found.values() if len(below) > 1]


def _other_syncs(node: Node, record: Record, axes: Sequence[int]) -> Iterator[Suggestion]:
    """The other collectives that may stand in a sync's place; ``axes`` are those that other steps gather or scatter."""
    before = cast(Sync, record.primitive)
    forms: list[Sync] = []

    def form(mode: Mode, op: Any = None, *, axis: int = -1) -> None:
        inputs = before.inputs if mode in ("fwd_pre", "bwd_post") else None
        outputs = before.outputs if mode == "fwd_post" else None
        forms.append(Sync(mode, op, axis=axis, mesh_dim=before.mesh_dim, inputs=inputs, outputs=outputs))

    state = output_state(node, before.mesh_dim)
    if state != "partial":
        form("bwd_post", "all_reduce")
        for axis in axes:
            form("fwd_pre", "all_gather", axis=axis)
    if state != "split":
        form("fwd_post", "all_reduce")
        for axis in axes:
            form("fwd_post", "reduce_scatter", axis=axis)
    if before.op in ("all_gather", "reduce_scatter"):
        for axis in (0, 1, -1):
            if before.mode in ("fwd_pre", "fwd_post"):
                form(before.mode, before.op, axis=axis)
    if state == "split":
        form("fwd_post", "all_gather")
    for other in dict.fromkeys(forms):
        if other != before:
            yield Suggestion((Change(record.path, other, instead_of=record),))


def _sequence_axes(syncs: Sequence[Record]) -> list[int]:
    """The axes along which steps gather or scatter, but for that of the features."""
    primitives = [cast(Sync, record.primitive) for record in syncs]
    return sorted({each.axis for each in primitives if each.op in ("all_gather", "reduce_scatter")} - {-1})


def _sequence(nodes: Sequence[Node], axes: Sequence[int], mesh_dim: str) -> Iterator[Suggestion]:
    """Where some steps gather or scatter along an axis: layers without such a step."""
    lacking = _open_inputs(nodes, mesh_dim)
    for axis in axes:
        gather = Sync("fwd_pre", "all_gather", axis=axis, mesh_dim=mesh_dim)
        yield from (Suggestion((Change(node.path, gather),), likely=True) for node in lacking)
        for _, below in _by_parent(lacking):
            yield Suggestion(tuple(Change(node.path, gather) for node in below), likely=True)
        for node in nodes:
            if output_state(node, mesh_dim) == "partial" and not _syncs(node, "fwd_post"):
                scatter = Sync("fwd_post", "reduce_scatter", axis=axis, mesh_dim=mesh_dim)
                yield Suggestion((Change(node.path, scatter),), likely=True)


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
