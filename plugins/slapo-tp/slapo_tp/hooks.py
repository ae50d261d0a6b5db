"""Implement slapo's hooks: refuse steps, and report missing steps of a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from slapo_core import Node, Primitive, Record, Schedule, Suggestion, Violation, hookimpl
from slapo_tp.obligations import (
    OWN_HOOKS,
    cut_heads,
    doubled_reductions,
    full_biases,
    missing_gradient_reductions,
    missing_reductions,
    repeated_shards,
)
from slapo_tp.split_state import split_axis
from slapo_tp.suggestions import suggestions
from slapo_tp.sync import Sync


def carried_sync_violations(node: Node, primitive: Primitive) -> Iterator[Violation]:
    """Refuse ``replace(..., drop=...)`` of split tensors at a module with collectives.

    Args:
        node: the module to replace.
        primitive: a ``core.replace``.
    """
    names: tuple[str, ...] = primitive.drop  # type: ignore[attr-defined]
    for mesh_dim in node.mesh.sizes if node.mesh is not None else ():
        split = [name for name in names if _is_split(node, name, mesh_dim)]
        syncs = [record for record in node.records if _is_in_force(node, record, mesh_dim)]
        if split and syncs:
            shown = " and ".join(f"'{name}'" for name in split)
            place = f"sch['{node.path}']"
            yield Violation(
                f"it drops {shown}, split over mesh_dim '{mesh_dim}', but the collective of {syncs[0]} would go on "
                "with the new module, whose tensors are full",
                f"replace first, split then: {place}.replace(...), {place}.shard(...), {place}.sync(...)",
            )


def _is_split(node: Node, name: str, mesh_dim: str) -> bool:
    path, _, own = name.rpartition(".")
    try:
        holder: Node = node[path] if path else node
    except LookupError:
        return False  # replace itself refuses an unknown tensor
    return split_axis(holder, own, mesh_dim) is not None


def _is_in_force(node: Node, record: Record, mesh_dim: str) -> bool:
    """Return whether the collective of an earlier step is still at the module."""
    sync = record.primitive
    if not isinstance(sync, Sync) or sync.mesh_dim != mesh_dim:
        return False
    return any(isinstance(hook, OWN_HOOKS) or hook is sync.op for _, hook in node.hooks)


@hookimpl
def slapo_preconditions(node: Node, primitive: Primitive) -> Iterator[Violation]:
    """Refuse to keep a collective at a module that becomes unsharded."""
    if primitive.name == "core.replace":
        yield from carried_sync_violations(node, primitive)


@hookimpl
def slapo_check(schedule: Schedule) -> Iterator[Violation]:
    """Refuse missing and doubled reductions, lost biases, cut heads, repeated shards."""
    for mesh_dim in schedule.mesh.sizes if schedule.mesh is not None else ():
        yield from full_biases(schedule, mesh_dim)
        yield from missing_reductions(schedule, mesh_dim)
        yield from doubled_reductions(schedule, mesh_dim)
        yield from missing_gradient_reductions(schedule, mesh_dim)
        yield from cut_heads(schedule, mesh_dim)
        yield from repeated_shards(schedule, mesh_dim)


@hookimpl
def slapo_suggest(
    schedule: Schedule, gradients: Sequence[str], splits: Mapping[str, tuple[int, ...]]
) -> Iterator[Suggestion]:
    """Suggest missing or moved reductions, other splits, attributes to divide, and norms to split."""
    for mesh_dim in schedule.mesh.sizes if schedule.mesh is not None else ():
        yield from suggestions(schedule, gradients, splits, mesh_dim)
