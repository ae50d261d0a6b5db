"""What slapo asks this plugin: may a step be applied, and what is missing in a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slapo_core import Node, Primitive, Suggestion, Violation, hookimpl
from slapo_core.spec.request import ScheduledModel
from slapo_tp.carried_syncs import carried_sync_violations
from slapo_tp.obligations import cut_heads, doubled_reductions, missing_gradient_reductions, missing_reductions
from slapo_tp.suggestions import suggestions

__all__ = ["slapo_check", "slapo_preconditions", "slapo_suggest"]


@hookimpl
def slapo_preconditions(node: Node, primitive: Primitive) -> Iterator[Violation]:
    """A collective must not go on with a module that is whole again."""
    if primitive.name == "core.replace":
        yield from carried_sync_violations(node, primitive)


@hookimpl
def slapo_check(schedule: ScheduledModel) -> Iterator[Violation]:
    """Partial sums and gradients that are reduced by no step or twice, biases that no step adds, heads that are cut."""
    for mesh_dim in schedule.mesh.sizes if schedule.mesh is not None else ():
        yield from missing_reductions(schedule, mesh_dim)
        yield from doubled_reductions(schedule, mesh_dim)
        yield from missing_gradient_reductions(schedule, mesh_dim)
        yield from cut_heads(schedule, mesh_dim)


@hookimpl
def slapo_suggest(schedule: ScheduledModel, gradients: Sequence[str]) -> Iterator[Suggestion]:
    """Reductions of outputs, of input gradients and of parameters' gradients that may be missing."""
    for mesh_dim in schedule.mesh.sizes if schedule.mesh is not None else ():
        yield from suggestions(schedule, gradients, mesh_dim)
