"""Tensors that need not be sent: computed of constants and sizes alone, or a view of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from slapo_core.tracing import FlatGraph
from slapo_pipeline.partition.nodes import is_constructor, is_given, is_part
from slapo_pipeline.partition.places import Places

__all__ = ["Constants"]

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
    """Of one flat graph.

    Args:
        flat: the graph.
        places: of its nodes.
    """

    def __init__(self, flat: FlatGraph, places: Places) -> None:
        self.flat, self.places = flat, places
        self._written = {flat.storages.get(read) for reads in flat.writes.values() for read in reads}
        self._known: dict[tuple[fx.Node, bool], bool] = {}
        self._is_switched = any(getattr(node.target, "__name__", "") == "set_state" for node in flat.graph.nodes)

    def is_constant(self, node: fx.Node) -> bool:
        """Whether computing it again gives the same, of what every stage has, and costs next to nothing."""
        value = self.flat.values[node]
        return not value.requires_grad and (self._is(node, of_batch=False) or self._is(node, of_batch=True))

    def _is(self, node: fx.Node, *, of_batch: bool) -> bool:
        """Whether it is computed of sizes alone; or ``of_batch``: a view of the batch, or a cast of it."""
        key = (node, of_batch)
        if key not in self._known:
            self._known[key] = self._find(node, of_batch)
        return self._known[key]

    def _find(self, node: fx.Node, of_batch: bool) -> bool:
        value = self.flat.values.get(node)
        if not isinstance(value, torch.Tensor):
            if is_constructor(node) or is_part(node, self.flat):
                return all(self._is(read, of_batch=of_batch) for read in node.all_input_nodes)
            if not self.places.is_bound(node):
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
