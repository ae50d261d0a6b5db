"""`Segment`: the graph of one stage in the making."""

from __future__ import annotations

from typing import Any

from torch import fx

from slapo_core.tracing import set_state

__all__ = ["Segment"]


class Segment:
    """The graph of one stage in the making.

    Args:
        index: of the stage.

    Attributes:
        known: what nodes of the flat graph are here: nodes, constants, containers of such.
        sources: what the placeholders are given: ``("input", parameter)``, ``("captured", number)``, ``("constant",
            object)``, ``("value", node)``, or ``("grad", None)`` for whether gradients are taken outside.
        uses: nodes of earlier stages whose values it receives.
        makes: nodes whose values it gives.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.graph = fx.Graph()
        self.known: dict[fx.Node, Any] = {}
        self.sources: dict[fx.Node, tuple[str, Any]] = {}
        self.uses: dict[fx.Node, fx.Node] = {}
        self.makes: dict[fx.Node, Any] = {}
        self._grad: fx.Node | None = None

    def given(self, node: fx.Node, captured: int | None) -> fx.Node:
        """An argument of the model, or a captured tensor."""
        source = ("input", str(node.target)) if captured is None else ("captured", captured)
        return self._placeholder(node.name, source)

    def hold(self, value: Any) -> fx.Node:
        """An object that is there before the model is called."""
        for node, (kind, what) in self.sources.items():
            if kind == "constant" and what is value:
                return node
        return self._placeholder(f"object_{len(self.sources)}", ("constant", value))

    def receive(self, node: fx.Node) -> fx.Node:
        """A value of an earlier stage."""
        self.uses[node] = self._placeholder(node.name, ("value", node))
        return self.uses[node]

    def switch(self, grad: bool, autocast: Any, cache: bool) -> None:
        """Switch gradients and autocast; gradients stay off where they are not taken outside."""
        if self._grad is None:
            self._grad = self._placeholder("gradients_enabled", ("grad", None))
        self.graph.call_function(set_state, (self._grad if grad else False, autocast, cache))

    def clone_first(self, node: fx.Node) -> None:
        """Work on a copy of a received value, from the start."""
        received = self.uses[node]
        with self.graph.inserting_before(next(each for each in self.graph.nodes if each.op != "placeholder")):
            own = self.graph.call_method("clone", (received,))
        received.replace_all_uses_with(own, delete_user_cb=lambda user: user is not own)
        self.known[node] = own

    def _placeholder(self, name: str, source: tuple[str, Any]) -> fx.Node:
        first = next((node for node in self.graph.nodes if node.op != "placeholder"), None)
        if first is None:
            made = self.graph.placeholder(name)
        else:
            with self.graph.inserting_before(first):
                made = self.graph.placeholder(name)
        self.sources[made] = source
        return made
