"""Suggest steps for a wrong schedule; ``verify`` tries them on copies."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from slapo_core import Change, Node, Record, Schedule, Suggestion
from slapo_core.internals import children_of
from slapo_tp.attributes import ShardAttribute
from slapo_tp.layers import Role, layer_type_of
from slapo_tp.shard import Shard
from slapo_tp.split_state import (
    as_tuple,
    bias_is_left_out,
    makes_gradient_partial,
    output_state,
    own_tensor,
    sites,
    sized_tensor,
    split_axis,
    split_together,
    weight_name,
)
from slapo_tp.splits import packed_sizes
from slapo_tp.sync import Sync
from slapo_tp.sync_gradient import SyncGradient


def suggestions(
    schedule: Schedule, gradients: Sequence[str], splits: Mapping[str, tuple[int, ...]], mesh_dim: str
) -> Iterator[Suggestion]:
    """Yield steps that may be missing along ``mesh_dim``, likely ones first.

    Args:
        schedule: the wrong one.
        gradients: full names of the parameters whose gradients differ; empty where the output does.
        splits: paths of layers whose output is split, with the sizes.
        mesh_dim: of several ranks, along which a step works.
    """
    assert schedule.mesh is not None
    if schedule.mesh.size(mesh_dim) == 1:
        return
    nodes = list(schedule.root.walk())
    if gradients:
        sums = list(_suggest_sync_gradients(schedule.root, gradients, mesh_dim))
        is_local = len({_pattern(name.rpartition(".")[0]) for name in gradients}) <= _FEW
        yield from sums if is_local else ()
        yield from _suggest_gradient_reductions(nodes, mesh_dim)
        yield from () if is_local else sums  # where all gradients before a layer are partial, one reduction is better
        yield from _suggest_inputs(schedule, mesh_dim)
        yield from _suggest_other_places(schedule, mesh_dim, ("bwd_post", "backward"), makes_gradient_partial)
    else:
        yield from _suggest_reductions(nodes, mesh_dim)
        yield from _suggest_norms(nodes, mesh_dim)
        yield from _suggest_attributes(nodes, splits, mesh_dim, schedule.mesh.size(mesh_dim))
        yield from _suggest_other_places(schedule, mesh_dim, ("fwd_post", "forward"), _is_partial)
        yield from _suggest_axes(schedule, mesh_dim)
        yield from _suggest_packed(schedule, splits, mesh_dim)


_FEW = 2  # places of gradients that may be partial each by itself


def _suggest_reductions(nodes: Sequence[Node], mesh_dim: str) -> Iterator[Suggestion]:
    step = Sync("fwd_post", "all_reduce", mesh_dim=mesh_dim)
    missing = [
        Change(node.path, step)
        for node in nodes
        if output_state(node, mesh_dim) == "partial"
        and not any(_has_sync(tied, "fwd_post", "forward") for tied, _ in sites(node, weight_name(node)))
    ]
    if len(missing) > 1:
        yield Suggestion(tuple(missing), likely=True)
    for number, change in enumerate(missing):
        yield Suggestion((change,), likely=number < 2)


def _suggest_gradient_reductions(nodes: Sequence[Node], mesh_dim: str) -> Iterator[Suggestion]:
    step = Sync("bwd_post", "all_reduce", mesh_dim=mesh_dim)
    by_parent: dict[str, list[Change]] = {}
    for node in nodes:
        above = node.parent
        around = [place for place in (node, above, above and above.parent) if place is not None]
        is_reduced = any(_has_sync(place, "bwd_post", "backward", "fwd_pre") for place in around)
        if makes_gradient_partial(node, mesh_dim) and not is_reduced:
            by_parent.setdefault(above.path if above is not None else "", []).append(Change(node.path, step))
    yield from (Suggestion((change,), likely=True) for changes in by_parent.values() for change in changes)
    for parent, changes in by_parent.items():
        if len(changes) > 1:
            yield Suggestion(tuple(changes), likely=True)
            yield Suggestion((Change(parent, step),))


def _suggest_sync_gradients(root: Node, gradients: Sequence[str], mesh_dim: str) -> Iterator[Suggestion]:
    by_path: dict[str, list[str]] = {}
    for full_name in gradients:
        path, _, name = full_name.rpartition(".")
        try:
            node: Node = root[path] if path else root
        except LookupError:
            continue  # a step replaced the module
        if name not in node.parameters or split_axis(node, name, mesh_dim) is not None:
            continue
        steps = [record.primitive for record in node.records if isinstance(record.primitive, SyncGradient)]
        is_bias_of_sync = name == "bias" and bias_is_left_out(node, mesh_dim)
        if not is_bias_of_sync and not any(name in as_tuple(step.names) for step in steps):
            by_path.setdefault(path, []).append(name)
    changes = [
        Change(path, SyncGradient(names[0] if len(names) == 1 else tuple(names), mesh_dim=mesh_dim))
        for path, names in by_path.items()
    ]
    if changes and sum(map(len, by_path.values())) == len(gradients):
        yield Suggestion(tuple(changes), likely=True)
    if len(changes) > 1:
        yield from (Suggestion((change,)) for change in changes[:4])


def _has_sync(node: Node, *modes: str) -> bool:
    steps = [record.primitive for record in node.records]
    return any(isinstance(step, Sync) and step.mode in modes for step in steps)


def _is_partial(node: Node, mesh_dim: str) -> bool:
    return output_state(node, mesh_dim) == "partial"


# -- steps at other places ------------------------------------------------------------------------------------


def _suggest_other_places(
    schedule: Schedule, mesh_dim: str, modes: tuple[str, ...], concerns: Callable[[Node, str], bool]
) -> Iterator[Suggestion]:
    """Move each ``sync`` to the modules below, or to the one around.

    Args:
        schedule: the wrong one.
        mesh_dim: of the steps.
        modes: of the steps.
        concerns: whether the step is for this layer.
    """
    down: list[tuple[Change, ...]] = []
    for records in _alike(schedule, lambda step: isinstance(step, Sync) and step.mode in modes, mesh_dim):
        nodes = [node for record in records if (node := _node(schedule.root, record.path)) is not None]
        if len(nodes) < len(records):
            continue
        places = [_below(node, mesh_dim, concerns) for node in nodes]
        if any(places):
            down.append(_moved(records, places, modes))
        for level in range(_LEVELS):
            if not any(places):
                break
            yield Suggestion(_moved(records, places, modes), likely=level < 2)
            places = [[below for place in those for below in _below(place, mesh_dim, concerns)] for those in places]
        around = [[above] for node in nodes if (above := _called_around(node)) is not None]
        if len(around) == len(records):
            yield Suggestion(_moved(records, around, modes))
    if len(down) > 1:
        yield Suggestion(tuple(change for changes in down for change in changes))


_LEVELS = 3


def _below(place: Node, mesh_dim: str, concerns: Callable[[Node, str], bool]) -> list[Node]:
    """List the modules one level below with layers that the step is for."""
    found = []
    for name in children_of(place.module) if not concerns(place, mesh_dim) else ():
        child: Node = place[name]
        if any(concerns(each, mesh_dim) for each in child.walk()):
            is_called = not isinstance(child.module, (nn.ModuleList, nn.ModuleDict))
            found += [child] if is_called else _below(child, mesh_dim, concerns)
    return found


def _called_around(node: Node) -> Node | None:
    """Return the module around that has a forward."""
    above = node.parent
    while above is not None and isinstance(above.module, (nn.ModuleList, nn.ModuleDict)):
        above = above.parent
    return above


def _moved(records: Sequence[Record], places: Sequence[Sequence[Node]], modes: tuple[str, ...]) -> tuple[Change, ...]:
    changes = []
    for record, those in zip(records, places, strict=True):
        changes.append(Change(record.path, instead_of=record))
        for place in those if not any(_has_sync(place, *modes) for place in those) else ():
            step: Any = record.primitive
            kept = tuple(name for name in step.inputs or () if name in _arguments(place.module))
            changes.append(Change(place.path, dataclasses.replace(step, inputs=kept or None)))
    return tuple(changes)


def _suggest_inputs(schedule: Schedule, mesh_dim: str) -> Iterator[Suggestion]:
    """Add one argument of the forward to ``inputs``; or name only the first."""
    is_it = lambda step: isinstance(step, Sync) and step.mode in ("bwd_post", "backward", "fwd_pre")  # noqa: E731
    found: list[tuple[bool, int, Suggestion]] = []
    first: dict[type[nn.Module], list[Change]] = {}
    for records in _alike(schedule, is_it, mesh_dim):
        node, step = _node(schedule.root, records[0].path), records[0].primitive
        names = _arguments(node.module) if node is not None else []
        if not isinstance(step, Sync) or len(names) < 2:
            continue
        given = [names[key] if isinstance(key, int) and key < len(names) else key for key in step.inputs or ()]
        others = [(*given, name) for name in names if name not in given] if given else [(names[0],)]
        others.sort(key=lambda inputs: bool(_WITHOUT_GRADIENT.search(str(inputs[-1]))))
        for number, inputs in enumerate(others):
            other = dataclasses.replace(step, inputs=inputs)
            changes = tuple(Change(record.path, other, instead_of=record) for record in records)
            found.append((not given, number, Suggestion(changes, likely=bool(given) and number < 2)))
            if not given and node is not None:
                first.setdefault(type(node.module), []).extend(changes)
    found += [(True, -1, Suggestion(tuple(changes), likely=True)) for changes in first.values()]
    found.sort(key=lambda each: each[:2])
    yield from (suggestion for _, _, suggestion in found)


_WITHOUT_GRADIENT = re.compile("mask|past|cache|ind(ex|ices)|ids|position_embeddings|training|output_")
"""In names of arguments that are tried last."""

_TRIED = 4  # at most this many likely suggestions of one kind


def _arguments(module: nn.Module) -> list[str]:
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]


def _alike(schedule: Schedule, is_it: Callable[[Any], bool], mesh_dim: str) -> list[list[Record]]:
    """Group equal steps at the same place of repeated blocks."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in schedule.records:
        step: Any = record.primitive
        if is_it(step) and step.mesh_dim == mesh_dim and not callable(getattr(step, "op", None)):
            groups.setdefault((_pattern(record.path), str(step)), []).append(record)
    return list(groups.values())


def _pattern(path: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def _node(root: Node, path: str) -> Node | None:
    try:
        found: Node = root[path] if path else root
    except LookupError:
        return None  # a step replaced the module
    return found


# -- other splits ---------------------------------------------------------------------------------------------


def _suggest_axes(schedule: Schedule, mesh_dim: str) -> Iterator[Suggestion]:
    """Split a layer on its input axis in place of its output axis, or the reverse."""
    for records in _alike(schedule, lambda step: isinstance(step, Shard), mesh_dim):
        node, step = _node(schedule.root, records[0].path), records[0].primitive
        kind = layer_type_of(node.module) if node is not None else None
        if node is None or kind is None or not isinstance(step, Shard) or kind.weight not in as_tuple(step.names):
            continue
        own = kind.role(step.axis % len(kind.axes))
        role: Role | None = "input" if own == "output" else "output" if own == "input" else None
        axis = kind.axis_of(role) if role is not None else None
        if axis is not None:
            names = (kind.weight, *(("bias",) if role == "output" and own_tensor(node, "bias") is not None else ()))
            other = Shard(names if len(names) > 1 else kind.weight, axis=axis, mesh_dim=mesh_dim)
            changes = [Change(record.path, other, instead_of=record) for record in records]
            gathers = _gathers(schedule, {record.path for record in records}, mesh_dim) if role == "input" else []
            changes += [Change(each.path, Sync("fwd_post", "all_reduce", mesh_dim=mesh_dim), each) for each in gathers]
            yield Suggestion(tuple(changes))


def _gathers(schedule: Schedule, paths: Collection[str], mesh_dim: str) -> list[Record]:
    """Return the steps that gather outputs at these paths: of partial sums they are reductions."""
    steps = [(record, record.primitive) for record in schedule.records if record.path in paths]
    return [
        record
        for record, step in steps
        if isinstance(step, Sync) and step.mesh_dim == mesh_dim and (step.mode, step.op) == ("fwd_post", "all_gather")
    ]


def _suggest_packed(schedule: Schedule, splits: Mapping[str, tuple[int, ...]], mesh_dim: str) -> Iterator[Suggestion]:
    """Split a layer in the matrices into which the model splits its output."""
    for records in _alike(schedule, lambda step: isinstance(step, Shard), mesh_dim):
        node, step = _node(schedule.root, records[0].path), records[0].primitive
        sizes = splits.get(records[0].path, ())
        if node is None or not isinstance(step, Shard) or output_state(node, mesh_dim) != "split" or not sizes:
            continue
        if packed_sizes(step.packed, sum(sizes), step.shards) != sizes:
            other = dataclasses.replace(step, packed=len(sizes) if len(set(sizes)) == 1 else sizes)
            changes = tuple(Change(record.path, other, instead_of=record) for record in records)
            yield Suggestion(changes, likely=True)


# -- sizes that do not fit the shards -------------------------------------------------------------------------


def _suggest_norms(nodes: Sequence[Node], mesh_dim: str) -> Iterator[Suggestion]:
    """Split the norms of channels between two split layers."""
    changes = []
    for node in nodes:
        channels = 0
        for name in children_of(node.module):
            child: Node = node[name]
            state, kind = output_state(child, mesh_dim), layer_type_of(child.module)
            if state is not None and kind is not None and kind.axis_of("channel") is None:
                channels = _full_features(child, mesh_dim) if state == "split" else 0
            sized = sized_tensor(child, kind) if kind is not None and kind.axis_of("channel") is not None else None
            tensor = own_tensor(child, sized) if sized is not None and state is None else None
            if channels and tensor is not None and tensor.shape[0] == channels:
                changes.append(Change(child.path, Shard(split_together(child), axis=0, mesh_dim=mesh_dim), first=True))
    if changes:
        yield Suggestion(tuple(changes), likely=True)
    if len(changes) > 1:
        yield from (Suggestion((change,)) for change in changes[:_TRIED])


def _full_features(node: Node, mesh_dim: str) -> int:
    kind, axis = layer_type_of(node.module), split_axis(node, weight_name(node), mesh_dim)
    return node.layout(kind.weight).shape[axis] if kind is not None and axis is not None else 0


def _suggest_attributes(
    nodes: Sequence[Node], splits: Mapping[str, tuple[int, ...]], mesh_dim: str, size: int
) -> Iterator[Suggestion]:
    """Divide counts and sizes of modules with layers split on their output."""
    tried: dict[tuple[str, ...], list[str]] = {}
    for node in nodes:
        children = _split_children(node, mesh_dim)
        features = {_full_features(child, mesh_dim) for child in children} - {0}
        matrices = {extent for child in children for extent in splits.get(child.path, ())}
        for names in _attribute_sets(node, features, matrices, size):
            tried.setdefault((type(node.module).__qualname__, *names), []).append(node.path)
    for number, ((_, *divided), paths) in enumerate(tried.items()):
        step = ShardAttribute(divided[0] if len(divided) == 1 else tuple(divided), mesh_dim=mesh_dim)
        yield Suggestion(tuple(Change(path, step) for path in paths), likely=number < _TRIED)


def _split_children(node: Node, mesh_dim: str) -> list[Node]:
    children = (node[name] for name in children_of(node.module))
    return [child for child in children if output_state(child, mesh_dim) == "split"]


def _attribute_sets(node: Node, full: set[int], matrices: set[int], size: int) -> Iterator[tuple[str, ...]]:
    """Yield sets of attributes to divide together: head counts and widths.

    Args:
        node: the module.
        full: the features of its split layers.
        matrices: the sizes into which their outputs are split.
        size: the number of ranks.
    """
    if not full:
        return
    known = {
        name: value
        for name, value in vars(node.module).items()
        if type(value) is int and value > 0 and value % size == 0 and name not in node.changed_attributes
    }
    counts = [name for name, value in known.items() if any(extent % value == 0 and extent > value for extent in full)]
    heads = [name for name in counts if re.search("head|group", name) and not re.search("dim|size|width", name)]
    parts = {extent // number for extent in full for number in (1, 2, 3) if extent % number == 0} | matrices
    widths = [name for name, value in known.items() if value in parts and name not in heads]
    heads = heads or [name for name in counts if name not in widths and not re.search("dim|size|width|idx|index", name)]
    sets = [heads, [*heads, *widths], widths, *([name] for name in (*widths, *heads))]
    sets += [[*heads, width] for width in widths] if len(widths) > 1 else []
    yield from dict.fromkeys(tuple(names) for names in sets if names)
