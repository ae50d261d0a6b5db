"""Answer the hook `slapo_liveness`: the values sent from each stage to the next."""

from __future__ import annotations

from collections.abc import Sequence

from slapo_core import hookimpl
from slapo_runtime.stages.partition import Liveness, Partition

__all__ = ["slapo_liveness"]


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
