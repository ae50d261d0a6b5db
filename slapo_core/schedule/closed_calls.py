"""Modules that the graph of a traced one calls, and in which nothing can be found therefore."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slapo_core.tree.node import TreeNode

__all__ = ["closed_calls", "how_to_open"]


def closed_calls(nodes: Iterable[TreeNode]) -> tuple[str, ...]:
    """Paths of modules with code of their own that the graphs of ``nodes`` call, and ``flatten=True`` would open.

    Not those of torch.nn, nor those that hooks or steps have changed: they stay calls.
    """
    from slapo_core.graph.leaves import is_changed, is_predefined

    found: dict[str, None] = {}
    for node in nodes:
        graph: Any = node.graph
        if graph is None or graph.first is None or graph.leaves.flatten:
            continue
        for each in graph.first.recorded.graph.nodes:
            if each.op != "call_module":
                continue
            module = node.module.get_submodule(str(each.target))
            if not is_predefined(module) and not is_changed(module):
                found[f"{node.path}.{each.target}" if node.path else str(each.target)] = None
    return tuple(found)


def how_to_open(closed: tuple[str, ...]) -> str:
    """A sentence on the modules that were not looked into."""
    shown = ", ".join(map(repr, closed[:3])) + (f" and {len(closed) - 3} more" if len(closed) > 3 else "")
    them = "it is one call" if len(closed) == 1 else "each is one call"
    return f"not looked into: {shown}; {them} in the graph, and trace(flatten=True) shows what it computes"
