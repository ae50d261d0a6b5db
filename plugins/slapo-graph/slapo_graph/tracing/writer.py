"""The graph that is being recorded: its calls, guards and notes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from slapo_graph.printing import expression
from slapo_graph.private import storage_id
from slapo_graph.protocol import Guard, Untraceable, check
from slapo_graph.tracing.diagnostics import model_location


def empty_graph() -> fx.Graph:
    """Return a graph that names no value ``self``, which is the module in its code."""
    graph = fx.Graph()
    graph.erase_node(graph.placeholder("self"))  # the name stays taken
    return graph


def placeholder(graph: fx.Graph, name: str) -> fx.Node:
    """Add a placeholder that hides no name used by the code of graphs, e.g. ``torch``; its meta has ``name``."""
    node = graph.placeholder(name)
    node.target, node.meta["parameter"] = node.name, name
    return node


# What a recording saw besides the graph: the values of its nodes, what calls wrote to, which values share memory.


def module_end(path: str) -> None:
    """Mark the end of an inlined call of a module, in a graph with notes."""


class Notes:
    """Filled while a module is recorded; it keeps the tensors of that run, so it is thrown away with what it is for.

    Attributes:
        values: of nodes, as far as they are known: tensors (without values, mostly), numbers, containers of such, and
            an ``Opaque`` for any other object.
        writes: for nodes that changed some of their arguments in place: which.
        storages: for nodes that give tensors: a number that those share which lie in the same memory.
        value_reads: number of reads of concrete values (of a buffer, e.g.) during the run.
        needs_values: why the run was on values; None of a run without.
    """

    def __init__(self) -> None:
        self.values: dict[fx.Node, Any] = {}
        self.writes: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.storages: dict[fx.Node, int] = {}
        self.value_reads = 0
        self.needs_values: Exception | None = None

    def note_writes(self, node: fx.Node, written: list[Any]) -> None:
        """After a call: the arguments that it wrote to."""
        if written:
            self.writes[node] = tuple(dict.fromkeys(written))

    def note_storages(self, mode: Any) -> None:
        """At the end of a recording: where the tensors lie; ``mode`` is that of fake tensors, or None."""
        for node, value in self.values.items():
            if isinstance(value, torch.Tensor):
                own = value if mode is None else mode.fake(value)
                self.storages[node] = storage_id(own)


_COMPARABLE = (bool, int, float, str, type(None))


class GraphWriter:
    """Writes calls, arithmetic on sizes and guards to a new graph.

    Args:
        notes: filled with what else is to be known of the run; None for nothing.
    """

    def __init__(self, notes: Notes | None = None) -> None:
        self.graph, self.notes = empty_graph(), notes
        self.guards: list[Guard] = []
        self._guarded: set[tuple[fx.Node, Any]] = set()

    def compute(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any = None) -> fx.Node:
        """A call of ``function`` in the graph; ``args`` are nodes and constants already."""
        return self._marked(self.graph.call_function(function, args, kwargs or {}))

    def guard(self, node: fx.Node | None, expected: Any) -> None:
        """The recorded code went on because ``node`` gave ``expected``: check that at every call."""
        if node is None:
            return
        key = (node, expected if isinstance(expected, _COMPARABLE) else repr(expected))
        if key in self._guarded:
            return
        self._guarded.add(key)
        guard = Guard(expression(node), expected, model_location())
        self.guards.append(guard)
        self._marked(self.graph.call_function(check, (node, expected, len(self.guards) - 1)))

    def _marked(self, node: fx.Node) -> fx.Node:
        node.meta["location"] = model_location()
        return node

    def size(self, function: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
        """Arithmetic on sizes: dropped again if nothing uses it."""
        node = self.compute(function, args)
        node.meta["is_size"] = True
        return node

    def refusal(self, problem: str, hint: str | None = None) -> Untraceable:
        """The error for what cannot be recorded, with the model's line."""
        return Untraceable(problem, model_location(), hint)
