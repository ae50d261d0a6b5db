"""What comes closest to a pattern in a graph, and how it differs."""

from __future__ import annotations

from slapo_core.graph.patterns.data import Form
from slapo_core.graph.patterns.index import Indexed

__all__ = ["nearest_miss"]


def nearest_miss(forms: tuple[Form, ...], index: Indexed) -> str | None:
    """One sentence on the place where most steps of a form stand; None if none does."""
    return None
