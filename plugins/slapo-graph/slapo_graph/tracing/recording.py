"""The graph in the making, with the values of its nodes."""

from __future__ import annotations

import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx, nn

from slapo_core.internals import buffers_of, module_index, parameters_of
from slapo_graph.private import FakeTensor, tree_leaves
from slapo_graph.sizes import is_symbolic, symbolic
from slapo_graph.structure import Opaque, children, is_plain, rebuild
from slapo_graph.tracing.targets import target_of
from slapo_graph.tracing.writer import GraphWriter, Notes, placeholder


def structure_of(value: Any) -> Any:
    """Return class and size of a result of several parts: ``("tuple", 2)``, ``("dict", ("hidden",))``."""
    if isinstance(value, Mapping):
        return type(value).__name__, tuple(value)
    return type(value).__name__, len(value) if isinstance(value, tuple | list) else None


Modules = Sequence[tuple[str, nn.Module]]
_NO_CONTAINERS = frozenset([bool, int, float, str, type(None), set])
_NO_HOLDERS = _NO_CONTAINERS | {dict, list, tuple, OrderedDict}


@dataclass(frozen=True)
class Operand:
    """An operand of a node, named in the meta of others.

    Copies of a graph keep the names, and rewrites replace the operands.

    Args:
        node: the name of the node.
        index: among its :func:`operands_of`.
    """

    node: str
    index: int


def operands_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a node uses, each as often as it is used."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


class Recording(GraphWriter):
    """The graph in the making, with the values of its nodes.

    Args:
        root: the recorded module; its parameters, buffers and modules are known by their names.
        may_capture: whether tensors from outside may become a part of the graph.
        notes: further observations of the run.
        meta_device: the device that the module's meta tensors represent; None: the meta device.
    """

    def __init__(
        self,
        root: nn.Module,
        *,
        may_capture: bool = True,
        notes: Notes | None = None,
        meta_device: torch.device | None = None,
    ) -> None:
        super().__init__(notes)
        self.may_capture, self.meta_device = may_capture, meta_device
        self.captured: list[torch.Tensor] = []
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[Any] = []  # an id stands for one object only as long as that lives
        self._devices: dict[int, fx.Node] = {}
        modules = module_index.walk(root)
        self._held = {
            id(tensor): name
            for name, tensor in (
                *reversed(list(_registered(modules, parameters_of))),
                *reversed(list(_registered(modules, buffers_of))),
                *_plain_tensors(modules),
            )
        }
        self._parts = {id(part): (name, key) for name, key, part in _tensors_in_containers(modules)}
        self.modules = {id(module): path for path, module in reversed(modules)}

    # -- values and their nodes -------------------------------------------------------------------------------

    def register(self, value: Any, node: fx.Node) -> Any:
        """Let ``node`` give ``value``; return the value for the recorded code."""
        self._alive.append(value)
        self._nodes[id(value)] = node
        if self.notes is not None:
            self.notes.values[node] = value
        if isinstance(value, torch.Tensor):
            if not all(type(size) is int for size in value.shape):
                raise self.refusal("makes a tensor whose shape depends on values")
            node.meta["example"] = (tuple(value.shape), value.dtype)
            if isinstance(value, FakeTensor):
                # A new object for each tensor, so that a device read from it is recognized.
                device = torch.device(str(value.fake_device))
                value.fake_device = device
                self._alive.append(device)
                self._devices[id(device)] = node
        return value

    def give(self, value: Any, node: fx.Node) -> Any:
        """Register every part of a result, each with a node of its own; return the result for the recorded code."""
        if isinstance(value, torch.Tensor):
            return self.register(value, node)
        if type(value) in (int, float):
            return symbolic(self, value, node)
        parts = children(value)
        if parts is None and is_plain(value):
            self.guard(node, value)
            return value
        if parts is None:
            opaque = Opaque(value, self.refusal)
            self.register(opaque, node)
            return opaque
        taken = []
        for how, key, part in list(parts):
            if how == "item":
                below = self.compute(operator.getitem, (node, key))
            else:
                below = self.compute(getattr, (node, key))
            taken.append(self.give(part, below))
        made = rebuild(value, taken)
        return self.register(made, node)

    def known(self, value: Any) -> fx.Node | None:
        """Return the node that gives this very object; None if no node does."""
        return self._nodes.get(id(value))

    def represent(self, value: Any, node: Any) -> None:
        """Let a node, or a container of nodes, give a mutable container until :meth:`forget`."""
        self._alive.append(value)
        self._nodes[id(value)] = node

    def forget(self, value: Any) -> None:
        """Let no node give a container any more: its parts are known."""
        self._nodes.pop(id(value), None)

    def is_known(self, value: Any) -> bool:
        """Return whether a node gives ``value``, or the module holds it."""
        return id(value) in self._nodes or id(value) in self._held or id(value) in self._parts

    def take(self, container: fx.Node, key: Any) -> fx.Node:
        """Return the node of an item of a container."""
        return self.compute(operator.getitem, (container, key))

    def node(self, value: Any) -> Any:
        """Return an argument in the graph: a node, a constant, or a container of these."""
        if is_symbolic(value):
            node = value.node.node
            return value.node.hint if node is None else node
        known = self._nodes.get(id(value))
        if known is not None:
            return known
        if isinstance(value, torch.Tensor):
            return self._held_or_captured(value)
        if isinstance(value, torch.device) and id(value) in self._devices:
            return self.compute(getattr, (self._devices[id(value)], "device"))
        if type(value) is slice:
            return slice(self.node(value.start), self.node(value.stop), self.node(value.step))
        if isinstance(value, torch.Size):
            return tuple(self.node(part) for part in value)
        if is_plain(value):
            return value
        if isinstance(value, torch.Generator):
            raise self.refusal("uses a random number generator of its own")
        parts = children(value)
        if isinstance(value, deque | bytearray):  # which code cannot name
            raise self.refusal(f"gives a call a {type(value).__name__}", "make it a list, or a dictionary")
        if parts is None:
            return value
        inner = [self.node(part) for _, _, part in list(parts)]
        if type(value) in (tuple, list, dict):
            return rebuild(value, inner)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self.compute(type(value), tuple(inner))
        if isinstance(value, tuple | list):
            return self.compute(type(value), (list(inner),))
        keys = [key for _, key, _ in children(value) or ()]
        keyed = dict(zip(keys, inner, strict=True))
        if all(isinstance(key, str) for key in keys):
            return self.compute(type(value), (), keyed)
        return self.compute(type(value), (keyed,))

    def _held_or_captured(self, tensor: torch.Tensor) -> fx.Node:
        name = self._held.get(id(tensor))
        if name is not None:
            node = self.graph.get_attr(name)
        elif id(tensor) in self._parts:
            name, key = self._parts[id(tensor)]
            node = self.compute(operator.getitem, (self.graph.get_attr(name), key))
        else:
            if isinstance(tensor, nn.Parameter):
                raise self.refusal(
                    f"reads a parameter of shape {tuple(tensor.shape)} outside the traced module",
                    "trace the module that holds both",
                )
            if isinstance(tensor, FakeTensor):  # of the inside of another call
                raise self.refusal(
                    "uses a tensor that a module below made, and neither returned nor put into a list, a dictionary or "
                    "a dataclass that it is given",
                    "return it from that module, or give the module a list, a dictionary or a dataclass for it",
                )
            if not self.may_capture:
                raise self.refusal("uses a tensor created outside the traced forward")
            node = placeholder(self.graph, f"captured_{len(self.captured)}")
            first = next(each for position, each in enumerate(self.graph.nodes) if position == len(self.captured))
            if first is not node:  # after the former ones, in their order
                first.prepend(node)
            self.captured.append(tensor)
        self._alive.append(tensor)
        self._nodes[id(tensor)] = node
        if self.notes is not None:
            self.notes.values[node] = tensor
        return node

    # -- writing ----------------------------------------------------------------------------------------------

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """Write the call of a torch function."""
        kind, target, order = target_of(func, self.refusal)
        nodes = tuple(self.node(argument) for argument in args)
        if order is not None:
            nodes = tuple(nodes[position] for position in order)
        named = {name: self.node(value) for name, value in kwargs.items()}
        if kind == "attribute":
            node = self.graph.call_function(getattr, (nodes[0], target))
        elif kind == "method":
            node = self.graph.call_method(target, nodes, named)
        else:
            node = self.graph.call_function(target, nodes, named)
        return self._marked(node)

    def call_module(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """Write the call of a module below the recorded one."""
        nodes = tuple(self.node(argument) for argument in args)
        named = {name: self.node(value) for name, value in kwargs.items()}
        return self._marked(self.graph.call_module(path, nodes, named))

    def note_inlined(
        self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, begin: fx.Node | None
    ) -> None:
        """Note the nodes of an inlined module at its last node, to find the module by its path.

        Args:
            path: of the module.
            args: of its call.
            kwargs: of its call.
            out: the result.
            begin: the last node before the call.
        """
        last = self.known(out)
        inside: list[fx.Node] = []
        for node in reversed(self.graph.nodes):
            if node is begin:
                break
            if "example" in node.meta and node.op != "get_attr":  # a tensor
                inside.insert(0, node)
        uses = {used: Operand(node.name, index) for node in inside for index, used in enumerate(operands_of(node))}
        given = [*map(self.node, args)], {name: self.node(value) for name, value in kwargs.items()}
        if last in inside and all(node in uses for node in tree_leaves(given) if isinstance(node, fx.Node)):
            replaced = fx.map_arg(given, cast("Callable[[fx.Node], Any]", uses.__getitem__))
            last.meta["inlined"] = path, replaced, tuple(node.name for node in inside)

    def guard_structure(self, value: Any, node: fx.Node) -> None:
        """Keep the structure of what a module may give otherwise at another call."""
        if isinstance(value, tuple | list | Mapping):
            self.guard(self.compute(structure_of, (node,)), structure_of(value))

    def length(self, tensor: torch.Tensor, dim: int) -> Any:
        """Return the symbolic size of a tensor along ``dim``."""
        node = self._marked(self.graph.call_method("size", (self.node(tensor), dim)))
        return symbolic(self, int(tensor.size(dim)), node)


def _registered(modules: Modules, table: Callable[[nn.Module], Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters or buffers, under each of their names."""
    for path, module in modules:
        for name, tensor in table(module).items():
            if tensor is not None:
                yield (f"{path}.{name}" if path else name), tensor


def _plain_tensors(modules: Modules) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors that are plain attributes, which graphs read at every call as the code does."""
    for path, module in modules:
        for name, value in module.__dict__.items():
            if type(value) in _NO_HOLDERS:
                continue
            here = f"{path}.{name}" if path else name
            if isinstance(value, torch.Tensor):
                yield here, value
            elif not isinstance(value, nn.Module | type) and type(getattr(value, "__dict__", None)) is dict:
                yield from (
                    (f"{here}.{own}", part) for own, part in vars(value).items() if isinstance(part, torch.Tensor)
                )


def _tensors_in_containers(modules: Modules) -> Iterator[tuple[str, Any, torch.Tensor]]:
    """Yield tensors in containers that are attributes: attribute, index or key, and tensor."""
    for path, module in modules:
        for name, value in module.__dict__.items():
            if type(value) in _NO_CONTAINERS:
                continue
            if isinstance(value, list | tuple):
                pairs: Any = enumerate(value)
            elif isinstance(value, dict) and not name.startswith("_"):
                pairs = value.items()
            else:
                continue
            for key, part in pairs:
                if isinstance(part, torch.Tensor) and is_plain(key):
                    yield (f"{path}.{name}" if path else name), key, part
