"""`GraphPattern`: what ``find`` looks for, as plain data, and where a graph has it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from torch import fx, nn

from slapo_core.graph.patterns.calls import Attribute
from slapo_core.graph.patterns.comparing import pairs_of
from slapo_core.graph.patterns.data import Constant, Form, Wildcard
from slapo_core.graph.patterns.index import Indexed
from slapo_core.graph.patterns.matching import Embedding
from slapo_core.graph.patterns.searching import embeddings
from slapo_core.ranks.rank_consistency import describe

__all__ = ["Found", "GraphPattern"]


@dataclass(frozen=True)
class Found:
    """A place in one graph where a pattern stands.

    Args:
        nodes: that belong to it, in the graph's order.
        inputs: the values it reads, in the order of the pattern's arguments. A parameter or buffer of the traced module
            that no earlier node of the graph reads (a module of torch.nn reads it) is an
            :class:`~slapo_core.graph.patterns.calls.Attribute`.
        outputs: those of its nodes whose values are used outside of it, in the graph's order.
        captures: by name: a value as in ``inputs``, or a plain constant.
        form: which of the pattern's forms it is.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node | Attribute, ...]
    outputs: tuple[fx.Node, ...]
    captures: dict[str, Any]
    form: int = 0


@dataclass(frozen=True)
class GraphPattern:
    """A pattern without live objects (but the function of a ``where``): comparable, hashable, to be saved.

    Args:
        forms: the alternatives; of two that begin at one node the earlier one counts.
        text: how messages call it.
        name: under which a plugin provides it; None if none does.
    """

    forms: tuple[Form, ...]
    text: str = field(default="pattern", compare=False)
    name: str | None = field(default=None, compare=False)

    def matches(self, graph: fx.Graph, module: nn.Module) -> list[Found]:
        """Where ``graph`` has the pattern; no node is in two matches.

        The first match begins at the earliest possible node; of those that begin there, the one of the earliest form
        counts. The next begins at the earliest node that still leaves one, and so on.

        Args:
            graph: of a traced module.
            module: that module.
        """
        index = Indexed(graph, module)
        known: list[Found] | None = index.found.get(self)
        if known is None:
            found, _ = embeddings(self.forms, index)
            known = [_found(self.forms[number], number, embedding, index) for number, embedding in found]
            if self._is_of_graphs:
                index.found[self] = known
        return list(known)

    def nearest_miss(self, graph: fx.Graph, module: nn.Module) -> str | None:
        """How what comes closest to the pattern in ``graph`` differs from it; None if nothing resembles it."""
        from slapo_core.graph.patterns.misses import nearest_miss

        return nearest_miss(self.forms, Indexed(graph, module))

    def to_data(self) -> Any:
        """As what JSON can hold.

        Raises:
            SerializationError: it has a predicate that is no function at the top level of a module.
        """
        from slapo_core.graph.patterns.saving import to_data

        return {"forms": [to_data(form) for form in self.forms], "text": self.text}

    @classmethod
    def from_data(cls, data: Any, find_function: Any = None) -> GraphPattern:
        """The pattern that :meth:`to_data` saved.

        Args:
            data: as read from JSON.
            find_function: gives a predicate by its name, ``"module:name"``; imports nothing.

        Raises:
            ReplayError: it is no pattern.
        """
        from slapo_core.graph.patterns.saving import pattern_from_data

        forms, text = pattern_from_data(data, find_function)
        return cls(forms, text)

    @cached_property
    def slapo_described(self) -> str:
        """The pattern as ranks compare it: some have hundreds of forms, and every layer a step with it."""
        digest = hashlib.sha256(describe(self.forms).encode()).hexdigest()
        return f"<{self.text}, sha256 {digest[:16]}>"

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.forms)

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}  # a hash is of this process

    @cached_property
    def _is_of_graphs(self) -> bool:
        """Whether layers that share a graph have the same matches: nothing else is asked."""
        steps = [step for form in self.forms for step in form.steps]
        inner = [each for step in steps for _, operand in step.arguments for each, _ in pairs_of(operand, operand)]
        return all(step.target.kind != "where" for step in steps) and not any(
            isinstance(each, Wildcard) and each.shape is not None for each in inner
        )

    def __str__(self) -> str:
        return self.text


def _found(form: Form, number: int, embedding: Embedding, index: Indexed) -> Found:
    positions = sorted(embedding.positions)
    nodes = tuple(index.calls[position].node for position in positions)
    inside = set(nodes)

    def given(value: Any) -> Any:
        if isinstance(value, Attribute):
            read = index.reads.get(value)
            return read if read is not None and index.position[read] < positions[0] else value
        return value

    if form.steps[0].target.kind in ("glob", "regex", "where"):
        inputs = tuple(dict.fromkeys(given(value) for value in index.calls[positions[0]].values))
    else:
        inputs = tuple(given(embedding.bindings[name]) for name in form.inputs)
    captures = {}
    for name, operand in form.captures:
        if isinstance(operand, Wildcard):
            captures[name] = given(embedding.bindings[operand.name])
        elif isinstance(operand, Constant):
            captures[name] = operand.value
        else:
            captures[name] = index.calls[embedding.positions[operand.step]].node
    outputs = tuple(node for node in nodes if any(user not in inside for user in node.users))
    return Found(nodes, inputs, outputs, captures, number)
