"""Split the backward pass of a stage: gradients of inputs first, of weights later."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from slapo_runtime.losses import is_leaf
from slapo_torch.private import is_compiled
from slapo_torch.torch_pipelining import recomputes

Arrived = tuple[torch.Tensor | None, ...]


def _accumulate(node: Any, parameters: list[torch.Tensor], arrived: Arrived) -> None:
    """Accumulate the gradients of parameters below a node, from the gradients that arrived there."""
    given = [(GradientEdge(node, slot), one) for slot, one in enumerate(arrived) if one is not None]
    if not given:
        return
    # A tensor hook there runs a second time: its new result is replaced.
    handle = node.register_prehook(lambda _: arrived)
    try:
        torch.autograd.backward(
            [edge for edge, _ in given], [gradient for _, gradient in given], inputs=parameters, retain_graph=True
        )
    finally:
        handle.remove()


def backward_of_inputs(
    roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], starts: Sequence[torch.Tensor]
) -> Callable[[], None]:
    """Run the first part of a backward pass: the gradients of the received values.

    Args:
        roots: of the backward pass, each with a graph.
        gradients: of the roots.
        starts: the leaves of received values, at least one.

    Returns:
        the second part, which accumulates the gradients of the other parameters.
    """
    graph = _BackwardGraph([root.grad_fn for root in roots])
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
    arrived: dict[Any, Arrived] = {}
    handles = [node.register_prehook(_keep(arrived, node)) for node in behind]
    try:
        torch.autograd.backward(list(roots), list(gradients), inputs=[*starts, *now], retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()

    def later() -> None:
        for node, parameters in behind.items():
            if node in arrived:
                _accumulate(node, parameters, arrived[node])

    return later


class _BackwardGraph:
    """The nodes of a backward pass.

    Attributes:
        leaves: node that accumulates a gradient -> its tensor.
    """

    def __init__(self, roots: Sequence[Any]) -> None:
        self._roots = roots
        self.leaves: dict[Any, torch.Tensor] = {}
        self._next: dict[Any, list[Any]] = {}
        self._order: list[Any] = []  # in topological order, leaves first
        stack = [(root, False) for root in roots]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                self._order.append(node)
            elif node not in self._next:
                self._next[node] = [one for one, _ in node.next_functions if one is not None]
                if is_leaf(node):
                    self.leaves[node] = node.variable
                stack.append((node, True))
                stack.extend((one, False) for one in self._next[node] if one not in self._next)

    def leading_to(self, ends: set[Any]) -> set[Any]:
        """Return the nodes from which an end is reachable, without the ends."""
        found: set[Any] = set()
        for node in self._order:
            if any(one in ends or one in found for one in self._next[node]):
                found.add(node)
        return found

    def places(self, leaves: dict[Any, torch.Tensor], between: set[Any]) -> dict[Any, set[Any]]:
        """Return the nodes of ``between`` that directly reach each leaf.

        A leaf that a root reaches without them has None among its places, and so several.
        """
        below: dict[Any, frozenset[Any]] = {}  # leaves that a node outside of ``between`` reaches
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


def _keep(arrived: dict[Any, Arrived], node: Any) -> Any:
    def keep(gradients: Arrived) -> None:
        arrived[node] = tuple(gradients)

    return keep


def _is_custom(node: Any) -> bool:
    return isinstance(node, torch.autograd.function.BackwardCFunction)


_CHECKPOINTED = "a checkpointed function would be recomputed for each part"
_COMPILED = "a compiled backward runs once"
_COMPILED_NODE = "CompiledFunctionBackward"
_HOOKED = "a tensor's hook would run in both parts"


class SplitCheck:
    """Check in a stage's first forward whether its backward can be split.

    Args:
        module: of the stage.
        name: for the warning.

    Attributes:
        reason: for a full backward; "" if it can be split.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._name = name
        self._is_over = False
        self.reason = _COMPILED if any(map(is_compiled, module.modules())) else ""

    @contextlib.contextmanager
    def watch_forward(self) -> Iterator[None]:
        """Watch the first forward, without module hooks, which would change its graph."""
        if self._is_over or not torch.is_grad_enabled():
            yield
            return
        if self.reason:  # known already
            yield
        else:
            with _ForwardMode(self):
                yield
        self._is_over = True
        self._warn()

    def find_compiled(self, roots: Iterable[torch.Tensor]) -> None:
        """Find compiled functions in the autograd graph, before a backward pass."""
        if self.reason or "torch._dynamo" not in sys.modules:
            return
        seen = {one.grad_fn for one in roots if one.grad_fn is not None}
        stack = list(seen)
        while stack:
            node = stack.pop()
            if type(node).__name__ == _COMPILED_NODE:  # its name() may be hidden by an attribute of the function
                self.reason = _COMPILED
                self._warn()
                return
            for below, _ in node.next_functions:
                if below is not None and below not in seen:
                    seen.add(below)
                    stack.append(below)

    def _warn(self) -> None:
        if self.reason:
            warnings.warn(
                f"{self._name} does not split its backward pass, because {self.reason}: gradients are correct, but the "
                "schedule's bubbles remain",
                stacklevel=3,
            )


class _ForwardMode(TorchFunctionMode):
    """Note calls inside of a checkpointed function, and hooks of tensors."""

    def __init__(self, check: SplitCheck) -> None:
        super().__init__()
        self._check, self._outside = check, recomputes()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.register_hook and not args[0].is_leaf:
            self._check.reason = self._check.reason or _HOOKED
        if recomputes() != self._outside:
            self._check.reason = self._check.reason or _CHECKPOINTED
        return func(*args, **(kwargs or {}))
