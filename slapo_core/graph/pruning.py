"""Take out of a recorded graph what nothing uses; only what certainly has no effect."""

from __future__ import annotations

import math
import operator

from torch import fx

__all__ = ["drop_unused"]

_READS = (operator.getitem, getattr, len)


def drop_unused(graph: fx.Graph) -> None:
    """Remove unused reads of sizes, parts and parameters, and unused arithmetic on sizes.

    Torch calls stay, used or not: the recorded code made them, and one may draw random numbers or write to a tensor.
    """
    for node in reversed(list(graph.nodes)):
        if not node.users and _is_pure(node):
            graph.erase_node(node)


def _is_pure(node: fx.Node) -> bool:
    if node.op == "get_attr":
        return True
    if node.op == "call_method":
        return node.target in ("size", "stride", "numel", "dim")
    if node.op != "call_function":
        return False
    return (
        node.target in _READS
        or node.meta.get("is_size", False)
        or getattr(node.target, "__module__", "") == math.__name__
    )
