"""What `fit` says."""

from __future__ import annotations

from dataclasses import dataclass

from slapo_core.estimation.results import Estimate
from slapo_core.spec.sizes import format_bytes

__all__ = ["Fit", "Point"]


@dataclass(frozen=True)
class Point:
    """One set of units that `fit` had to choose from.

    Args:
        paths: of the units that are checkpointed.
        predicted: peak in bytes, by the model of the two played steps.
        confirmed: peak in bytes, by an estimate of just this set; None where none was made.
        flops: floating-point operations of a step that are for computing again, on all kinds of ranks.
        seconds: likewise, by the roofline; None without a device.
    """

    paths: tuple[str, ...]
    predicted: int
    confirmed: int | None
    flops: int
    seconds: float | None


@dataclass(frozen=True)
class Fit:
    """What :func:`slapo_core.fit` chose, and from what.

    Args:
        paths: of the modules that were checkpointed; empty where the schedule fitted as it was.
        target: bytes that were allowed.
        estimate: of the schedule as it is now.
        before: of the schedule as it was.
        curve: what there was to choose from, the least peak first; the last point has no unit checkpointed. Empty
            where the schedule fitted as it was.
        estimates: how many kinds of ranks were played for it; answers that were known already are not counted.
    """

    paths: tuple[str, ...]
    target: int
    estimate: Estimate
    before: Estimate
    curve: tuple[Point, ...] = ()
    estimates: int = 0

    @property
    def peak(self) -> int:
        """Bytes of the rank that needs most; at most the target."""
        return self.estimate.memory.total

    @property
    def recomputed(self) -> int:
        """Floating-point operations of a step that the chosen units are computed again with, on all kinds of ranks."""
        return flops_of(self.estimate) - flops_of(self.before)

    def __str__(self) -> str:
        first = f"peak {format_bytes(self.peak)} of {format_bytes(self.target)}"
        if not self.paths:
            return f"{first}: nothing to checkpoint"
        whole = flops_of(self.before)
        more = f", {100 * self.recomputed / whole:.1f} % more FLOPs" if whole else ""
        lines = [
            f"{first}, {format_bytes(self.before.memory.total)} before: {len(self.paths)} checkpointed{more}",
            "  peak       by estimate  units  FLOPs again",
        ]
        for point in self.curve:
            mark = ">" if point.paths == self.paths else " "
            confirmed = format_bytes(point.confirmed) if point.confirmed is not None else "-"
            again = f"{100 * point.flops / whole:.1f} %" if whole else "-"
            lines.append(f"{mark} {format_bytes(point.predicted):<10} {confirmed:<12} {len(point.paths):<6} {again}")
        return "\n".join(lines)


def flops_of(estimate: Estimate) -> int:
    """Of a step, one rank of each kind."""
    return sum(kind.flops for kind in estimate.kinds)
