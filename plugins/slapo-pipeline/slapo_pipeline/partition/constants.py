"""Tensors that are computed of constants and sizes alone: made again where they are needed, not sent."""

from __future__ import annotations

from torch import fx

from slapo_core.tracing import FlatGraph
from slapo_pipeline.partition.places import Places

__all__ = ["Constants"]


class Constants:
    """Of one flat graph.

    Args:
        flat: the graph.
        places: of its nodes.
    """

    def __init__(self, flat: FlatGraph, places: Places) -> None:
        self.flat, self.places = flat, places

    def is_constant(self, node: fx.Node) -> bool:
        """Whether another computation of it gives the same, of what every stage has."""
        return False
