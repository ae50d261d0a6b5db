"""What stands at the places of matches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from slapo_core.spec.graph import Match
from slapo_core.spec.node import Node
from slapo_core.spec.primitive import Violation

if TYPE_CHECKING:
    from torch import fx

__all__ = ["changes_swallowed", "first_graph"]


def first_graph(place: Node) -> fx.Graph:
    """The graph that a traced node's matches are named after."""
    graph: Any = place.graph
    recorded: fx.Graph = graph.first.recorded.graph
    return recorded


def changes_swallowed(place: Node, match: Match) -> Iterator[Violation]:
    """What steps put around calls of modules that would be called no more; the same on a mesh of any size."""
    inside = set(match.nodes)
    called = [str(each.target) for each in first_graph(place).nodes if each.op == "call_module" and each.name in inside]
    for path in dict.fromkeys(called):
        for below in place[path].walk():
            if not (below.hooks or below.wrappers or below.graph is not None):
                continue
            by = " and ".join(map(str, below.records)) or "a step at another module"
            yield Violation(
                f"{match} calls '{below.path}', which was changed by {by}, and would be called no more",
                "replace first, change then; or match what lies around it",
            )
