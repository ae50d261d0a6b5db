"""What slapo asks this plugin: the stages of a cut model, and what passes between them."""

from __future__ import annotations

from collections.abc import Iterator

from slapo_core import Node, Primitive, Violation, hookimpl
from slapo_pipeline.liveness import slapo_liveness
from slapo_pipeline.partition.hook import slapo_partition
from slapo_pipeline.rules import step_violations
from slapo_pipeline.split import PipelineSplit

__all__ = ["slapo_liveness", "slapo_partition", "slapo_preconditions"]


@hookimpl
def slapo_preconditions(node: Node, primitive: Primitive) -> Iterator[Violation]:
    """A step must not be put around the calls of a module that a cut spreads over stages."""
    root = node
    while root.parent is not None:
        root = root.parent
    cuts = {
        path: str(record)
        for record in root.records_below()
        if isinstance(record.primitive, PipelineSplit)
        for path in record.primitive.cuts(record.path)
    }
    if cuts and not isinstance(primitive, PipelineSplit):
        yield from step_violations(node, primitive, cuts)
