"""How points, values and durations are written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["STARTED", "choice", "duration", "number", "point_words", "same_point"]

STARTED = ("ok", "oom", "timeout", "crash", "wrong")
"""Statuses of trials that ran; the others were pruned before anything was started."""


def number(value: float) -> str:
    """Four significant digits: ``"312.4"``, ``"0.01234"``, ``"1.234e+07"``."""
    return f"{value:.4g}" if abs(value) < 1e4 or abs(value) >= 1e7 else f"{value:,.0f}"


def choice(value: Any) -> str:
    """A candidate, e.g. ``0.5``, ``flash``, ``(1, 2)``."""
    return value if isinstance(value, str) else f"{value:.4g}" if isinstance(value, float) else str(value)


def point_words(point: Mapping[str, Any]) -> str:
    """A point on one line: ``batch=32 checkpoint=0.5 tp=1``."""
    return " ".join(f"{name}={choice(value)}" for name, value in point.items())


def duration(seconds: float) -> str:
    """``"8 s"``, ``"3 min 20 s"``, ``"2 h 5 min"``; under ten seconds with a digit behind the point."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def same_point(point: Mapping[str, Any]) -> str:
    """What two equal points have in common whether or not one was read back from JSON (tuples become lists there)."""
    return json.dumps(dict(point), sort_keys=True)
