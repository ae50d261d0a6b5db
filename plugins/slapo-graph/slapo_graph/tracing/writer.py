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
    """Return a graph in which no value takes the name ``self``."""
    graph = fx.Graph()
    graph.erase_node(graph.placeholder("self"))  # the name stays taken
    return graph


def placeholder(graph: fx.Graph, name: str) -> fx.Node:
    """Add a placeholder with a name that the code of graphs does not use; its meta has ``name``."""
    node = graph.placeholder(name)
    node.target, node.meta["parameter"] = node.name, name
    return node


# Observations of a recording besides the graph: values of nodes, writes, shared memory.


def module_end(path: str) -> None:
    """Mark the end of an inlined call, in a graph with notes."""


class Notes:
    """Observations of one recording; they keep its tensors, and go with their user.

    Attributes:
        values: known values of nodes: tensors (mostly fake), numbers, containers of these, and an ``Opaque`` for
            any other object.
        writes: by node, the arguments that it changed in place.
        storages: by node, a number of its tensor's storage; nodes that share memory have equal ones.
        value_reads: number of reads of concrete values (of a buffer, e.g.) during the run.
        needs_values: the error on fake tensors, if the run is on real ones; else None.
    """

    def __init__(self) -> None:
        self.values: dict[fx.Node, Any] = {}
        self.writes: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.storages: dict[fx.Node, int] = {}
        self.value_reads = 0
        self.needs_values: Exception | None = None

    def note_writes(self, node: fx.Node, written: list[Any]) -> None:
        """Note the arguments that a call wrote to."""
        if written:
            self.writes[node] = tuple(dict.fromkeys(written))

    def note_storages(self, mode: Any) -> None:
        """Note the storages of the tensors, at the end; ``mode`` is the fake mode, or None."""
        for node, value in self.values.items():
            if isinstance(value, torch.Tensor):
                own = value if mode is None else mode.fake(value)
                self.storages[node] = storage_id(own)


_COMPARABLE = (bool, int, float, str, type(None))


class GraphWriter:
    """Write calls, arithmetic on sizes and guards to a new graph.

    Args:
        notes: filled with observations of the run; None for none.
    """

    def __init__(self, notes: Notes | None = None) -> None:
        self.graph, self.notes = empty_graph(), notes
        self.guards: list[Guard] = []
        self._guarded: set[tuple[fx.Node, Any]] = set()

    def compute(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any = None) -> fx.Node:
        """Write a call of ``function``; ``args`` are nodes and constants."""
        return self._marked(self.graph.call_function(function, args, kwargs or {}))

    def guard(self, node: fx.Node | None, expected: Any) -> None:
        """Write a check that ``node`` gives ``expected``, as in the recording."""
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
        """Write arithmetic on sizes, dropped later if unused."""
        node = self.compute(function, args)
        node.meta["is_size"] = True
        return node

    def refusal(self, problem: str, hint: str | None = None) -> Untraceable:
        """Return the error for code that cannot be recorded, with the model's line."""
        return Untraceable(problem, model_location(), hint)
