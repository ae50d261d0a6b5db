"""Predict memory, communication and time of a training step."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slapo_estimate.estimates import estimate, estimate_functions, estimate_source
    from slapo_estimate.results import CollectiveCall, Estimate, Memory, RankEstimate

__all__ = ["CollectiveCall", "Estimate", "Memory", "RankEstimate", "estimate", "estimate_functions", "estimate_source"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "estimates" if name.startswith("estimate") else "results"
    value = getattr(importlib.import_module(f"slapo_estimate.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
