"""The calls of one graph in normal form, looked up by operation and by what they use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from slapo_core.graph.patterns.calls import Attribute, Call, Items, Slice, parts
from slapo_core.graph.patterns.modules import module_call, settings
from slapo_core.graph.patterns.operations import constant_kind, function_call, method_call
from slapo_core.graph.regions import set_state
from slapo_core.spec.tracer import check

__all__ = ["Indexed", "IndexedCall", "values_in"]

_CACHE = "_slapo_calls"
_Kept = tuple[Any, Any, Any, Any]
"""Arguments of a node, settings of its module, and what was made of them."""


@dataclass
class IndexedCall:
    """A node that calls something.

    Args:
        node: of the graph.
        position: of the node.
        call: in normal form; None where it is a module's of which nothing is known.
        values: nodes and attributes it uses, in the order of its arguments.
        module: which it calls, if it calls one.
        path: of that module.
        parameters: of that module's forward.
        given: to that module, by these names.
    """

    node: fx.Node
    position: int
    call: Call | None
    values: tuple[Any, ...]
    module: nn.Module | None = None
    path: str = ""
    parameters: tuple[str, ...] = ()
    given: dict[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """What a glob or regular expression over call targets may match."""
        own = (self.path, type(self.module).__name__) if self.module is not None else ()
        return (*own, *(self.call.names if self.call is not None else ()))


class Indexed:
    """The calls of ``graph``.

    What does not depend on the module is kept with the graph, as long as the nodes stay what they are.

    Args:
        graph: of a traced module.
        module: that module.
    """

    def __init__(self, graph: fx.Graph, module: nn.Module) -> None:
        self.graph, self.module = graph, module
        self.calls: dict[int, IndexedCall] = {}
        self.by_operation: dict[str, list[int]] = {}
        self.users: dict[Any, list[int]] = {}
        self.position: dict[fx.Node, int] = {}
        self.reads: dict[Attribute, fx.Node] = {}
        self._attributes: dict[str, Attribute] = {}
        self._tells_tensors = any("example" in node.meta for node in graph.nodes)
        kept: dict[fx.Node, _Kept] = graph.__dict__.setdefault(_CACHE, {})
        for position, node in enumerate(graph.nodes):
            self.position[node] = position
            if node.op == "get_attr":
                self.reads.setdefault(self.attribute(str(node.target)), node)
            if node.op not in ("call_function", "call_method", "call_module") or node.target in (check, set_state):
                continue
            found = self._module(node, position, kept) if node.op == "call_module" else self._call(node, position, kept)
            self.calls[position] = found
            if found.call is not None:
                self.by_operation.setdefault(found.call.operation, []).append(position)
            for value in found.values:
                users = self.users.setdefault(value, [])
                if not users or users[-1] != position:
                    users.append(position)

    def attribute(self, path: str) -> Attribute:
        """The one object that stands for the attribute at ``path``."""
        found = self._attributes.get(path)
        if found is None:
            found = self._attributes[path] = Attribute(path)
        return found

    def tensor(self, attribute: Attribute) -> Any:
        """What ``attribute`` is in the module now; None if it is gone."""
        found: Any = self.module
        for name in attribute.path.split("."):
            found = getattr(found, name, None)
        return found

    def _call(self, node: fx.Node, position: int, kept: dict[fx.Node, _Kept]) -> IndexedCall:
        entry = kept.get(node)
        if entry is not None and entry[0] == node.args and entry[1] == node.kwargs:
            call = entry[3]
        else:
            args, kwargs = self._value(node.args), self._value(node.kwargs)
            make: Any = function_call if node.op == "call_function" else method_call
            call = make(node.target, args, kwargs, self._kind)
            kept[node] = (node.args, node.kwargs, None, call)
        return IndexedCall(node, position, call, tuple(values_in(call.arguments.values())))

    def _module(self, node: fx.Node, position: int, kept: dict[fx.Node, _Kept]) -> IndexedCall:
        path = str(node.target)
        below = self.module
        for name in path.split("."):
            below = below._modules[name]  # type: ignore[assignment]
        now = settings(below)
        entry = kept.get(node)
        if entry is not None and entry[0] == node.args and entry[1] == node.kwargs and entry[2] == now:
            call, parameters, given = entry[3]
        else:
            args, kwargs = self._value(node.args), self._value(node.kwargs)
            call, parameters, given = module_call(
                below, path, args, kwargs, held=lambda name: self.attribute(f"{path}.{name}")
            )
            kept[node] = (node.args, node.kwargs, now, (call, parameters, given))
        values = tuple(values_in(given.values() if call is None else call.arguments.values()))
        return IndexedCall(node, position, call, values, below, path, parameters, given)

    def _kind(self, value: Any) -> str:
        if isinstance(value, Attribute):
            return "tensor"
        if isinstance(value, fx.Node):
            if "example" in value.meta or value.op == "placeholder":
                return "tensor"
            return "value" if self._tells_tensors else "unknown"
        return "sequence" if isinstance(value, tuple | Slice | Items) else constant_kind(value)

    def _value(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self.attribute(str(value.target)) if value.op == "get_attr" else value
        if isinstance(value, tuple | list):
            return tuple([self._value(part) for part in value])
        if isinstance(value, dict):
            return {key: self._value(part) for key, part in value.items()}
        if isinstance(value, slice):
            return slice(self._value(value.start), self._value(value.stop), self._value(value.step))
        return value


def values_in(operands: Any) -> Iterator[Any]:
    """The nodes and attributes among ``operands``, also inside of containers."""
    for operand in operands:
        if isinstance(operand, fx.Node | Attribute):
            yield operand
        elif (inner := parts(operand)) is not None:
            yield from values_in(inner)
