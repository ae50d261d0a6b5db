"""A backward pass in two: first the gradients that go back to other stages, later those of most parameters.

The nodes between the outputs and the received values run first. Where one of them also takes a parameter (the matrix
product of a linear layer takes its weight), what arrives there is kept, and in the second pass the same node runs once
more, for the parameter only. That is right for a node of torch's own, which computes what it is asked for, and for a
parameter that has one such place. Whatever else there is gets its gradient in the first pass: parameters with several
places (used twice in the stage) or none (they do not meet a received value), and those below a custom function, which
would run twice as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

__all__ = ["Later", "backward_of_inputs"]

_LEAF = "torch::autograd::AccumulateGrad"


class Later:
    """What is left for the second pass: places, what arrived there, and the parameters behind."""

    def __init__(self) -> None:
        self._places: list[tuple[Any, list[torch.Tensor], tuple[torch.Tensor | None, ...]]] = []

    def add(self, node: Any, parameters: list[torch.Tensor], arrived: tuple[torch.Tensor | None, ...]) -> None:
        self._places.append((node, parameters, arrived))

    def run(self) -> None:
        """Accumulate the gradients of the parameters."""
        for node, parameters, arrived in self._places:
            given = [(GradientEdge(node, slot), one) for slot, one in enumerate(arrived) if one is not None]
            if not given:
                continue
            # A hook of the tensor there has had its turn, and runs again: what it gives now is not taken.
            handle = node.register_prehook(lambda _, arrived=arrived: arrived)
            try:
                torch.autograd.backward(
                    [edge for edge, _ in given],
                    [gradient for _, gradient in given],
                    inputs=parameters,
                    retain_graph=True,
                )
            finally:
                handle.remove()
        self._places.clear()


def backward_of_inputs(
    roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], starts: Sequence[torch.Tensor]
) -> Later:
    """The first pass.

    Args:
        roots: what the backward begins with, each with a history.
        gradients: theirs.
        starts: leaves at which received values begin, at least one.

    Returns:
        the second pass.
    """
    graph = _Graph([root.grad_fn for root in roots])
    ends = {node for node, leaf in graph.leaves.items() if any(leaf is start for start in starts)}
    leaves = {node: leaf for node, leaf in graph.leaves.items() if node not in ends}
    places = graph.places(leaves, graph.leading_to(ends))
    now, behind = [], dict[Any, list[torch.Tensor]]()
    for node, leaf in leaves.items():
        place = next(iter(places[node])) if len(places[node]) == 1 else None
        if place is None or _is_custom(place):
            now.append(leaf)
        else:
            behind.setdefault(place, []).append(leaf)
    arrived: dict[Any, tuple[torch.Tensor | None, ...]] = {}
    handles = [node.register_prehook(_keep(arrived, node)) for node in behind]
    try:
        torch.autograd.backward(list(roots), list(gradients), inputs=[*starts, *now], retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
    later = Later()
    for node, theirs in behind.items():
        if node in arrived:
            later.add(node, theirs, arrived[node])
    return later


class _Graph:
    """The nodes of a backward pass.

    Attributes:
        leaves: where gradients are accumulated, and for which tensor.
    """

    def __init__(self, roots: Sequence[Any]) -> None:
        self._roots = roots
        self.leaves: dict[Any, torch.Tensor] = {}
        self._next: dict[Any, list[Any]] = {}
        self._order: list[Any] = []  # each after those that it leads to
        stack = [(root, False) for root in roots]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                self._order.append(node)
            elif node not in self._next:
                self._next[node] = [one for one, _ in node.next_functions if one is not None]
                if not _is_custom(node) and node.name() == _LEAF:
                    self.leaves[node] = node.variable
                stack.append((node, True))
                stack.extend((one, False) for one in self._next[node] if one not in self._next)

    def leading_to(self, ends: set[Any]) -> set[Any]:
        """The nodes from which an end is reached; an end is none of them."""
        found: set[Any] = set()
        for node in self._order:
            if any(one in ends or one in found for one in self._next[node]):
                found.add(node)
        return found

    def places(self, leaves: dict[Any, torch.Tensor], between: set[Any]) -> dict[Any, set[Any]]:
        """For each leaf: the nodes of ``between`` from which a way without others of them leads there.

        A leaf that is also reached without any of them has None among its places, so it has several.
        """
        below: dict[Any, frozenset[Any]] = {}  # leaves that a node outside of ``between`` leads to
        found: dict[Any, set[Any]] = {}
        for node in self._order:
            reached = {leaf for one in self._next[node] for leaf in below.get(one, ())}
            if node in leaves:
                reached.add(node)
            if node not in between:
                below[node] = frozenset(reached)
                continue
            for leaf in reached:
                found.setdefault(leaf, set()).add(node)
        for root in self._roots:
            for leaf in below.get(root, ()):
                found.setdefault(leaf, set()).update((None, root))
        return found


def _keep(arrived: dict[Any, tuple[torch.Tensor | None, ...]], node: Any) -> Any:
    def keep(gradients: tuple[torch.Tensor | None, ...]) -> None:
        arrived[node] = tuple(gradients)

    return keep


def _is_custom(node: Any) -> bool:
    return isinstance(node, torch.autograd.function.BackwardCFunction)
