"""The three steps that split schedules lack most: ``verify`` tries each on a copy, and tells which one helps.

- the sum of a partial output: ``sync("fwd_post", "all_reduce")`` behind a row-parallel layer;
- the sum of a partial input gradient: ``sync("bwd_post", "all_reduce")`` at, or around, column-parallel layers;
- the sum of the gradients of a full parameter that each rank uses for its own shard: ``sync_gradient``.

Whatever else is wrong, ``verify`` blames the step, or the layers, by leaving steps out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slapo_core import Change, Node, Suggestion
from slapo_core.spec.request import ScheduledModel
from slapo_tp.splits import (
    as_tuple,
    bias_is_left_out,
    makes_gradient_partial,
    output_state,
    sites,
    split_axis,
    weight_name,
)
from slapo_tp.sync import Sync
from slapo_tp.sync_gradient import SyncGradient


def suggestions(schedule: ScheduledModel, gradients: Sequence[str], mesh_dim: str) -> Iterator[Suggestion]:
    """Yield steps that may be missing along ``mesh_dim``, the more likely ones first.

    Args:
        schedule: the wrong one.
        gradients: full names of the parameters whose gradients differ; empty where the output does.
        mesh_dim: of several ranks, along which a step works.
    """
    assert schedule.mesh is not None
    if schedule.mesh.size(mesh_dim) == 1:
        return
    nodes = list(schedule.root.walk())
    if gradients:
        yield from _missing_sync_gradients(schedule.root, gradients, mesh_dim)
        yield from _missing_gradient_reductions(nodes, mesh_dim)
    else:
        yield from _missing_reductions(nodes, mesh_dim)


def _missing_reductions(nodes: Sequence[Node], mesh_dim: str) -> Iterator[Suggestion]:
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


def _missing_gradient_reductions(nodes: Sequence[Node], mesh_dim: str) -> Iterator[Suggestion]:
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


def _missing_sync_gradients(root: Node, gradients: Sequence[str], mesh_dim: str) -> Iterator[Suggestion]:
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
