"""Assign the flat graph's nodes to stages."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from slapo_graph.flat import FlatGraph, MakeDefaultDict, Opaque, check, contents_after, module_end, set_state

_QUERIES = frozenset([
    "size", "stride", "numel", "nelement", "dim", "ndimension", "is_contiguous", "is_floating_point", "is_complex",
    "get_device", "element_size", "storage_offset",
])  # fmt: skip


def is_given(node: fx.Node) -> bool:
    """Return whether a node's value exists in every stage."""
    return node.op in ("placeholder", "get_attr")


def is_constructor(node: fx.Node) -> bool:
    """Return whether a node makes a container of its arguments: a dataclass, a named tuple."""
    return node.op == "call_function" and isinstance(node.target, type | MakeDefaultDict)


def is_part(node: fx.Node, flat: FlatGraph) -> bool:
    """Return whether a node takes an item out of a container."""
    if node.op != "call_function" or node.target not in (operator.getitem, getattr):
        return False
    container = node.args[0]
    return isinstance(container, fx.Node) and not isinstance(flat.values.get(container), torch.Tensor)


def is_light(node: fx.Node, flat: FlatGraph) -> bool:
    """Return whether a node computes no tensor: numbers, items, containers, sizes of a tensor."""
    if isinstance(flat.values.get(node), torch.Tensor):
        return is_part(node, flat)
    if node.op == "call_method":
        return node.target in _QUERIES
    if node.op != "call_function" or node.target in (check, set_state, module_end):
        return False
    target: Any = node.target
    if bool(node.meta.get("is_size")) or isinstance(target, type) or target in (getattr, len, torch.Tensor.dim):
        return True
    return target is operator.getitem or getattr(target, "__name__", "") == "structure_of"


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that receive a value, also inside a container."""
    for user in node.users:
        if is_constructor(user):
            yield from readers(user)
        else:
            yield user


def title(node: fx.Node) -> str:
    """Return a name for a node's value."""
    takes_out = (operator.getitem, getattr)
    container = node.args[0] if node.op == "call_function" and node.target in takes_out else None
    if isinstance(container, fx.Node) and (container.op == "call_module" or container.target in takes_out):
        key = "".join(letter if letter.isalnum() else "_" for letter in str(node.args[1]))
        return f"{title(container)}_{key}"
    return node.name


class Uncuttable(Exception):  # noqa: N818 - becomes a TraceError that names the record
    """Signal a place where the model cannot be cut.

    Args:
        path: of the module after which the cut was asked.
        problem: the reason.
        hint: the corrected call.
        location: file and line of the model.
    """

    def __init__(
        self, path: str, problem: str, hint: str | None = None, location: tuple[str, int] | None = None
    ) -> None:
        super().__init__(problem)
        self.path, self.problem, self.hint, self.location = path, problem, hint, location


class NodePlacement:
    """Assign each node a stage: calls where recorded, others as early as possible.

    Args:
        flat: the graph.
        cuts: paths of the modules after whose calls the graph is cut, in any order.

    Attributes:
        position: node -> the stage in which it was recorded.
        order: node -> its number.
        cuts: paths, in the order in which their calls end.
        count: number of stages.

    Raises:
        Uncuttable: a module is not called, or several times, or nothing comes after it.
    """

    def __init__(self, flat: FlatGraph, cuts: Sequence[str]) -> None:
        self.flat = flat
        self.cuts: list[str] = []
        self.position: dict[fx.Node, int] = {}
        for node in flat.graph.nodes:
            if node.target is contents_after:  # with its call
                self.position[node] = self.position[node.args[0]]
                continue
            self.position[node] = len(self.cuts)
            path: Any = node.target if node.op == "call_module" else node.args[0] if node.target is module_end else None
            if path in cuts:
                if path in self.cuts:
                    raise Uncuttable(
                        path,
                        "the forward calls it more than once, so that the cut is ambiguous",
                        "cut after a module that is called once",
                        node.meta.get("location"),
                    )
                self.cuts.append(path)
        for path in cuts:
            if path not in self.cuts:
                raise Uncuttable(path, "the forward does not call it", "cut after a module that is called")
        self.count = len(self.cuts) + 1
        self.order = {node: number for number, node in enumerate(flat.graph.nodes)}
        self._homes: dict[fx.Node, int] = {}
        self._made: dict[fx.Node, bool] = {}
        for stage, path in enumerate(self.cuts):
            after = [node for node, position in self.position.items() if position == stage + 1]
            if not any(self.is_bound(node) and node.target is not set_state for node in after):
                problem = "nothing comes after it"
                if stage + 1 < len(self.cuts):
                    problem += f", before the cut after '{self.cuts[stage + 1]}'"
                raise Uncuttable(path, problem, "cut after an earlier module")

    def is_bound(self, node: fx.Node) -> bool:
        """Return whether a node runs in the one stage where it was recorded."""
        if is_given(node) or node.target is check or node.op == "output" or node.target is module_end:
            return False
        return not is_light(node, self.flat)

    def home(self, node: fx.Node) -> int:
        """Return the first stage in which a node can be computed."""
        known = self._homes.get(node)
        if known is None:
            if self.is_bound(node):
                known = self.position[node]
            else:
                known = max((self.home(read) for read in node.all_input_nodes), default=0)
            self._homes[node] = known
        return known

    def is_made(self, node: fx.Node) -> bool:
        """Return whether a node depends on values that some stage computes."""
        known = self._made.get(node)
        if known is None:
            if is_given(node):
                known = False
            else:
                known = self.is_bound(node) or any(self.is_made(read) for read in node.all_input_nodes)
            self._made[node] = known
        return known

    def part(self, container: fx.Node, how: str, key: Any, value: Any) -> fx.Node:
        """Return the node that takes an item out of a call's result.

        Args:
            container: the call's node.
            how: ``"item"`` or ``"attribute"``.
            key: of the item.
            value: the item.
        """
        function = operator.getitem if how == "item" else getattr
        for user in container.users:
            if user.target is function and user.args == (container, key):
                self.flat.values.setdefault(user, value)
                return user
        with self.flat.graph.inserting_after(container):
            made = self.flat.graph.call_function(function, (container, key))
        made.meta.update(location=container.meta.get("location"))
        self.flat.values[made] = value
        self.position[made], self.order[made] = self.position[container], self.order[container]
        return made


def made_object(value: Any, cut: str, how: str, node: fx.Node) -> Uncuttable:
    """Return the error for an object that stages would have to share.

    Args:
        value: the object or its fx node.
        cut: path of a cut.
        how: its use, e.g. ``"made before it and used after it"``.
        node: whose location the error gives.
    """
    kind = type(object.__getattribute__(value, "_value") if isinstance(value, Opaque) else value).__name__
    hint = "cut where only tensors pass, or keep it inside a module of one stage"
    if "Cache" in kind:
        hint = "training needs no cache: pass use_cache=False with the batch, or set model.config.use_cache = False"
    problem = f"the forward makes a {kind}, {how}, and only tensors and plain values can pass between stages"
    return Uncuttable(cut, problem, hint, node.meta.get("location"))


_LIKE = frozenset([
    "new_zeros", "new_ones", "new_full", "new_tensor", "zeros_like", "ones_like", "full_like",
])  # fmt: skip
_FACTORIES = frozenset(["arange", "eye", "full", "linspace", "ones", "tensor", "tril_indices", "triu_indices", "zeros"])
_VIEWS = frozenset([
    "bool", "broadcast_to", "chunk", "contiguous", "detach", "double", "expand", "expand_as", "flatten", "float",
    "getitem", "int", "long", "narrow", "permute", "reshape", "select", "split", "squeeze", "swapaxes", "t", "to",
    "transpose", "type_as", "unbind", "unsqueeze", "view",
])  # fmt: skip
_CHEAP = frozenset([
    "abs", "add", "and_", "bitwise_and", "bitwise_not", "bitwise_or", "clamp", "cat", "cumsum", "diff", "div", "eq",
    "floordiv", "ge", "gt", "invert", "le", "logical_and", "logical_not", "logical_or", "lt", "masked_fill", "max",
    "maximum", "min", "minimum", "mod", "mul", "ne", "neg", "or_", "pow", "repeat", "roll", "stack", "sub", "tril",
    "triu", "truediv", "where",
])  # fmt: skip


class Constants:
    """Find the values that each stage can recompute cheaply.

    Args:
        flat: the graph.
        placement: of its nodes.
    """

    def __init__(self, flat: FlatGraph, placement: NodePlacement) -> None:
        self.flat, self.placement = flat, placement
        self._written = {flat.storages.get(read) for reads in flat.writes.values() for read in reads}
        self._known: dict[tuple[fx.Node, bool], bool] = {}
        self._is_switched = any(getattr(node.target, "__name__", "") == "set_state" for node in flat.graph.nodes)

    def is_constant(self, node: fx.Node) -> bool:
        """Return whether every stage can recompute a value cheaply and equally."""
        value = self.flat.values[node]
        return not value.requires_grad and (self._is(node, of_batch=False) or self._is(node, of_batch=True))

    def _is(self, node: fx.Node, *, of_batch: bool) -> bool:
        """Return whether a node depends on sizes alone; with ``of_batch``, whether it views or casts the batch."""
        key = (node, of_batch)
        if key not in self._known:
            self._known[key] = self._find(node, of_batch)
        return self._known[key]

    def _find(self, node: fx.Node, of_batch: bool) -> bool:
        value = self.flat.values.get(node)
        if not isinstance(value, torch.Tensor):
            if is_constructor(node) or is_part(node, self.flat):
                return all(self._is(read, of_batch=of_batch) for read in node.all_input_nodes)
            if not self.placement.is_bound(node):
                return True  # a number
            return _name(node) in _VIEWS and self._reads(node, of_batch)  # split: a tuple
        if value.requires_grad or self.flat.storages.get(node) in self._written or node in self.flat.writes:
            return False
        if node.op == "placeholder":
            return of_batch
        if node.op == "get_attr":
            return not isinstance(value, torch.nn.Parameter)
        if is_part(node, self.flat):
            return self._reads(node, of_batch)
        if node.op not in ("call_function", "call_method") or not _is_of_torch(node.target):
            return False
        name = _name(node)
        if name in _LIKE:
            return all(is_given(read) or self._is(read, of_batch=of_batch) for read in _tensors(node, self.flat))
        if name in _VIEWS:
            return self._reads(node, of_batch)
        if of_batch or self._is_switched:
            return False
        return name in _FACTORIES or (name in _CHEAP and self._reads(node, of_batch))

    def _reads(self, node: fx.Node, of_batch: bool) -> bool:
        return all(self._is(read, of_batch=of_batch) for read in node.all_input_nodes)


def _tensors(node: fx.Node, flat: FlatGraph) -> list[fx.Node]:
    return [read for read in node.all_input_nodes if isinstance(flat.values.get(read), torch.Tensor)]


def _name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_method" else str(getattr(node.target, "__name__", ""))


def _is_of_torch(target: Any) -> bool:
    if isinstance(target, str):
        return True
    module = getattr(target, "__module__", None) or ""
    return module.partition(".")[0] in ("", "torch", "_operator", "builtins")
