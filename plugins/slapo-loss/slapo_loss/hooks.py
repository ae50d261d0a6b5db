"""Implement slapo's hooks: refuse steps that do not fit beside ``linear_cross_entropy``."""

from __future__ import annotations

from collections.abc import Iterator

from slapo_core import Node, Primitive, Schedule, Violation, hookimpl
from slapo_loss.linear_cross_entropy import LinearCrossEntropy
from slapo_loss.rules import beside_violations, split_violations


@hookimpl
def slapo_preconditions(node: Node, primitive: Primitive) -> Iterator[Violation]:
    """Refuse collectives on the logits."""
    yield from beside_violations(node, primitive)


@hookimpl
def slapo_check(schedule: Schedule) -> Iterator[Violation]:
    """Refuse a head that is split otherwise than along its classes."""
    for record in schedule.records:
        step = record.primitive
        if isinstance(step, LinearCrossEntropy) and record.path in schedule.root:
            yield from split_violations(schedule.root[record.path], step.mesh_dim)
