"""A search that was never run: a small polygon of two symbols and a kernel, and trials of every status."""

from __future__ import annotations

from typing import Any

from slapo_tune.samplers import Trial

__all__ = ["POINTS", "TRIALS"]

POINTS: list[dict[str, Any]] = [
    {"batch": batch, "checkpoint": ratio, "kernel": kernel}
    for batch in (2, 4, 8)
    for ratio in (0.0, 0.5, 1.0)
    if not (batch == 8 and ratio == 0.0)
    for kernel in ("plain", "flash")
]


def trial(number: int, status: str, value: float | None = None, reason: str = "", **more: Any) -> Trial:
    started = status not in ("refused", "over_memory")
    return Trial(number, POINTS[number], status, value, reason, seconds=4.0 if started else 0.1, **more)


def both(memory: float, time: float, ratio: float = 1.0) -> dict[str, Any]:
    measured = {"memory": memory, "time": time}
    return {"predicted": {"memory": ratio * memory, "time": 0.5 * ratio * time}, "measured": measured}


TRIALS = [
    trial(0, "ok", 10.0, **both(1000, 0.2)),
    trial(1, "ok", 30.0, **both(2000, 0.1, 1.5)),
    trial(2, "over_memory", reason="needs 3.2GiB of 3GiB"),
    trial(3, "over_memory", reason="needs 4.75GiB of 3GiB"),
    trial(4, "oom", reason="rank 1 ran out of memory\nTraceback ..."),
    trial(5, "timeout", reason="not finished within 300 s"),
    trial(6, "ok", 20.0, **both(3000, 0.4, 0.9)),
    trial(7, "refused", reason="4 heads do not divide by 3"),
    trial(8, "crash", reason="rank 0 was killed"),
    trial(9, "wrong", reason="loss is nan"),
    trial(10, "ok", 30.0, **both(4000, 0.3)),
]
