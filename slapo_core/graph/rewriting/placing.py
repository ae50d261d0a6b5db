"""Where one call can stand for several nodes: what runs before it, and what after it."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from slapo_core.graph.effects import Effects

__all__ = ["CannotPlace", "nodes_after"]


class CannotPlace(Exception):  # noqa: N818 - becomes an ApplyError
    """A match that cannot become one call."""

    def __init__(self, problem: str, hint: str | None = None) -> None:
        super().__init__(problem)
        self.problem, self.hint = problem, hint


def nodes_after(matched: Collection[fx.Node], effects: Effects) -> list[fx.Node]:
    """Which nodes between the matched ones must run after a call that stands for all of these, in their order.

    The others between them run before it. Both keep their order.

    Args:
        matched: of one graph, in its order.
        effects: of that graph.

    Raises:
        CannotPlace: a matched node needs what is computed from another one outside of the match; or two nodes would
            change places that must not.
    """
    first, last = matched[0], matched[-1]  # type: ignore[index]
    inside = set(matched)
    earlier: list[fx.Node] = []  # of the match, so far
    after: list[fx.Node] = []
    reasons: dict[fx.Node, str] = {}  # why a node that needs nothing of the match comes after it all the same
    node = first
    while True:
        if node in inside:
            back = next((value for value in node.all_input_nodes if value in reasons or value in after), None)
            if back is not None:
                raise CannotPlace(_why(node, back, reasons, earlier))
            for moved in after:
                problem = effects.conflict(moved, node)
                if problem is not None:
                    raise CannotPlace(problem)
            earlier.append(node)
        elif any(value in inside or value in after for value in node.all_input_nodes):
            after.append(node)
        else:
            problem = next(filter(None, (effects.conflict(one, node) for one in (*earlier, *after))), None)
            if problem is not None:
                reasons[node] = problem
                after.append(node)
        if node is last:
            return after
        node = node.next


def _why(node: fx.Node, back: fx.Node, reasons: dict[fx.Node, str], earlier: list[fx.Node]) -> str:
    """Of what ``node`` needs, ``back`` cannot run before the match."""
    stack, seen = [back], set()
    while stack:
        present = stack.pop()
        if present in reasons:
            return reasons[present]
        leaving = next((value for value in present.all_input_nodes if value in earlier), None)
        if leaving is not None:
            return f"the value of '{leaving}' leaves the match, and comes back by '{back}', which '{node}' reads"
        seen.add(present)
        stack.extend(value for value in present.all_input_nodes if value not in seen)
    raise AssertionError(f"'{back}' needs nothing of the match")
