"""Where the matches of a step lie."""

from __future__ import annotations

from collections.abc import Sequence

from slapo_core import Match, Node

__all__ = ["by_place"]


def by_place(node: Node, matches: Sequence[Match]) -> list[tuple[Node, list[Match]]]:
    """The traced nodes at or below ``node`` in which the matches lie, each with its own."""
    groups: dict[str, list[Match]] = {}
    for match in matches:
        groups.setdefault(match.path, []).append(match)
    prefix = f"{node.path}." if node.path else ""
    return [(node if path == node.path else node[path.removeprefix(prefix)], own) for path, own in groups.items()]
