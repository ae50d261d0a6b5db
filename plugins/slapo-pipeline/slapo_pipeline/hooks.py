"""Answer the hook `slapo_preconditions`: steps around a module that a cut spreads over stages."""

from __future__ import annotations

from collections.abc import Iterator

from slapo_core import Node, Primitive, Violation, hookimpl
from slapo_pipeline.rules import root_of, step_violations
from slapo_pipeline.split import PipelineSplit, cuts_of

__all__ = ["slapo_preconditions"]


@hookimpl
def slapo_preconditions(node: Node, primitive: Primitive) -> Iterator[Violation]:
    """Refuse steps around modules that a cut spreads over stages."""
    cuts = cuts_of(root_of(node).records_below())
    if cuts and not isinstance(primitive, PipelineSplit):
        yield from step_violations(node, primitive, cuts)
