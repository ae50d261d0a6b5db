"""Hooks: the stages of a cut model, and the values sent between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slapo_core import Node, Primitive, Violation, hookimpl
from slapo_pipeline.partition.hook import slapo_partition
from slapo_pipeline.rules import root_of, step_violations
from slapo_pipeline.split import PipelineSplit
from slapo_runtime.stages.partition import Liveness, Partition

__all__ = ["slapo_liveness", "slapo_partition", "slapo_preconditions"]


@hookimpl(trylast=True)  # a plugin that names its own liveness replaces this one
def slapo_liveness(partition: Partition, outputs: Sequence[str]) -> Liveness:
    """Keep a value live from its producer to its last reader.

    Source: paper section 4, liveness analysis.
    """
    last = len(partition.stages) - 1
    until = {
        name: last if name in outputs else max(value.consumers, default=value.producer)
        for name, value in partition.values.items()
    }
    return Liveness(
        tuple(
            tuple(name for name, value in partition.values.items() if value.producer <= boundary < until[name])
            for boundary in range(last)
        )
    )


@hookimpl
def slapo_preconditions(node: Node, primitive: Primitive) -> Iterator[Violation]:
    """Refuse steps around modules that a cut spreads over stages."""
    cuts = {
        path: str(record)
        for record in root_of(node).records_below()
        if isinstance(record.primitive, PipelineSplit)
        for path in record.primitive.cuts(record.path)
    }
    if cuts and not isinstance(primitive, PipelineSplit):
        yield from step_violations(node, primitive, cuts)
