"""The calls of one graph in normal form, looked up by operation and by what they use."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn
from torch.fx.node import map_aggregate

from slapo_core.internals import children_of
from slapo_graph.autocast_state import set_state
from slapo_graph.patterns.data import Attribute, CanonicalCall, Items, Slice, parts
from slapo_graph.patterns.operations import constant_kind, function_call, method_call, module_call, settings
from slapo_graph.private import tree_map_only
from slapo_graph.protocol import check
from slapo_graph.tracing.recording import Operand, operands_of

_KEPT = "_slapo_calls"


@dataclass
class IndexedCall:
    """A node that calls something.

    Args:
        node: of the graph.
        position: of the node.
        call: in normal form; None where it is a module's of which nothing is known.
        values: nodes and attributes it uses, in the order of its arguments.
        class_name: of the module which it calls, if it calls one.
        path: of that module.
        parameters: of that module's forward.
        given: to that module, by these names.
        inside: positions of all nodes of that module's call, where its code is in the graph.
    """

    node: fx.Node
    position: int
    call: CanonicalCall | None
    values: tuple[Any, ...]
    class_name: str | None = None
    path: str = ""
    parameters: tuple[str, ...] = ()
    given: dict[str, Any] = field(default_factory=dict)
    inside: tuple[int, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names that a glob or regular expression over call targets may match."""
        own = (self.path, self.class_name) if self.class_name is not None else ()
        return (*own, *(self.call.names if self.call is not None else ()))


class Indexed:
    """The calls of a graph and their operands, looked up by operation and by operand.

    Args:
        graph: of a traced module.
        module: that module; it is not kept.
        state: the settings that the tables depend on.

    Attributes:
        found: the matches by pattern, of patterns that ask for nothing else.
        module: of :func:`indexed`.
    """

    module: nn.Module

    def __init__(self, graph: fx.Graph, module: nn.Module, state: Any) -> None:
        self.state = state
        self.calls: dict[int, IndexedCall] = {}
        self.by_operation: dict[str, list[int]] = {}
        self.users: dict[Any, list[int]] = {}
        self.position: dict[fx.Node, int] = {}
        self.reads: dict[Attribute, fx.Node] = {}
        self.found: dict[Any, Any] = {}
        self._tells_tensors = any("example" in node.meta for node in graph.nodes)
        for position, node in enumerate(graph.nodes):
            self.position[node] = position
            if node.op == "get_attr":
                self.reads.setdefault(Attribute(str(node.target)), node)
            if node.op not in ("call_function", "call_method", "call_module") or node.target in (check, set_state):
                continue
            found = self._module(node, position, module) if node.op == "call_module" else self._call(node, position)
            self.calls[position] = found
            if found.call is not None:
                self.by_operation.setdefault(found.call.operation, []).append(position)
            self._note_inlined(found, module)
            for value in dict.fromkeys((*found.values, *values_in(found.given.values()))):
                self.users.setdefault(value, []).append(position)

    def tensor(self, attribute: Attribute) -> Any:
        """Return the present value of an attribute; None if it is gone."""
        found: Any = self.module
        for name in attribute.path.split("."):
            found = getattr(found, name, None)
        return found

    def _call(self, node: fx.Node, position: int) -> IndexedCall:
        make: Any = function_call if node.op == "call_function" else method_call
        call = make(node.target, *_given(node), self._kind)
        return IndexedCall(node, position, call, tuple(values_in(call.arguments.values())))

    def _module(self, node: fx.Node, position: int, module: nn.Module) -> IndexedCall:
        path = str(node.target)
        below = _module_at(module, path)
        call, parameters, given = module_call(below, path, *_given(node))
        values = tuple(values_in(given.values() if call is None else call.arguments.values()))
        return IndexedCall(node, position, call, values, type(below).__name__, path, parameters, given)

    def _note_inlined(self, found: IndexedCall, module: nn.Module) -> None:
        """Let the last node of an inlined module count as a call of it, if the graph has all of its nodes."""
        path, given, names = found.node.meta.get("inlined", ("", None, ()))
        if not names:
            return
        known = {node.name: node for node in self.position}
        if not all(name in known for name in names):
            return
        args, kwargs = tree_map_only(Operand, lambda each: operands_of(known[each.node])[each.index], given)
        below = _module_at(module, path)
        _, found.parameters, found.given = module_call(below, path, args, kwargs)
        found.path, found.class_name = path, type(below).__name__
        found.inside = tuple(sorted(self.position[known[name]] for name in names))

    def _kind(self, value: Any) -> str:
        if isinstance(value, Attribute):
            return "tensor"
        if isinstance(value, fx.Node):
            if "example" in value.meta or value.op == "placeholder":
                return "tensor"
            return "value" if self._tells_tensors else "unknown"
        return "sequence" if isinstance(value, tuple | Slice | Items) else constant_kind(value)


def indexed(graph: fx.Graph, module: nn.Module) -> Indexed:
    """Return the calls of a graph, as they are for a module.

    Kept with the graph, for as long as neither its nodes nor the settings of the modules that it calls change.

    Args:
        graph: of a traced module.
        module: that module.
    """
    state, kept = _state(graph, module), graph.__dict__.get(_KEPT)
    if kept is None or kept.state != state:
        kept = graph.__dict__[_KEPT] = Indexed(graph, module, state)
    made = copy.copy(kept)
    made.module = module
    return made


def _state(graph: fx.Graph, module: nn.Module) -> Any:
    """Return the settings that the indexed calls depend on."""
    nodes = [(node, node.target, node.args, node.kwargs) for node in graph.nodes]
    return nodes, [settings(_module_at(module, node.target)) for node, *_ in nodes if node.op == "call_module"]


def _module_at(module: nn.Module, path: Any) -> nn.Module:
    found: Any = module
    for name in path.split("."):
        found = children_of(found)[name]
    return found  # type: ignore[no-any-return]


def _given(node: fx.Node) -> Any:
    """Return the arguments of a call, with attributes in place of the nodes that read them."""

    def known(part: Any) -> Any:
        return Attribute(str(part.target)) if isinstance(part, fx.Node) and part.op == "get_attr" else part

    return map_aggregate((node.args, node.kwargs), known)


def values_in(operands: Any) -> Iterator[Any]:
    """Yield the nodes and attributes among operands, in containers too."""
    for operand in operands:
        if isinstance(operand, fx.Node | Attribute):
            yield operand
        elif (inner := parts(operand)) is not None:
            yield from values_in(inner)
