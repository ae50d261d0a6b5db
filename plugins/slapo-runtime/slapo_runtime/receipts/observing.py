"""``observe``: run training steps under a watch, and compare them with what schedule and runtime expect."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slapo_runtime.receipts.receipt import Finding, expectations, receipt, unexplained
from slapo_runtime.receipts.watch import Observed, Watch

if TYPE_CHECKING:
    from slapo_core import Engine, Schedule


@dataclass(frozen=True)
class Observation:
    """What training steps did.

    Args:
        findings: each expected effect with what was seen, and what nothing explains.
        record: everything seen on this rank.
    """

    findings: tuple[Finding, ...]
    record: Observed = field(repr=False)

    @property
    def missing(self) -> tuple[Finding, ...]:
        """The effects that were expected and not seen, and what neither a step nor the runtime explains."""
        return tuple(one for one in self.findings if not one.is_seen)


def observe(sch: Schedule | Engine, batch: Any = None, *, steps: int = 1, keep: bool = False) -> Observation:
    """Run training steps of a scheduled model or a built engine, and report what they did."""
    watch = Watch(sch)  # type: ignore[arg-type]
    with watch.watching() as record:
        for _ in range(steps):
            record.steps += 1
            output = sch.model(**batch) if isinstance(batch, dict) else sch.model(batch)  # type: ignore[union-attr]
            (output.loss if hasattr(output, "loss") else output.sum()).backward()
    expected = expectations(sch)  # type: ignore[arg-type]
    return Observation((*receipt(expected, record), *unexplained(record, expected)), record)
