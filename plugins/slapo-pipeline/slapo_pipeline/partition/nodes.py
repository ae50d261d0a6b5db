"""What kind of node a node of the flat graph is: bound to its place, or made again wherever it is needed."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from slapo_core.tracing import FlatGraph, check, left, set_state

__all__ = ["is_check", "is_given", "is_light", "is_part", "is_switch", "made_of"]

_QUERIES = frozenset([
    "size", "stride", "numel", "nelement", "dim", "ndimension", "is_contiguous", "is_floating_point", "is_complex",
    "get_device", "element_size", "storage_offset",
])  # fmt: skip


def is_check(node: fx.Node) -> bool:
    """A guard."""
    return node.target is check


def is_switch(node: fx.Node) -> bool:
    """Gradients or autocast are switched here."""
    return node.target is set_state


def is_given(node: fx.Node) -> bool:
    """An argument of the model, a captured tensor, a parameter or buffer: there in every stage."""
    return node.op in ("placeholder", "get_attr")


def is_part(node: fx.Node, flat: FlatGraph) -> bool:
    """Takes a part out of a container: of what a module returned, or of an argument."""
    if node.op != "call_function" or node.target not in (operator.getitem, getattr):
        return False
    whole = node.args[0]
    return isinstance(whole, fx.Node) and not isinstance(flat.notes.values.get(whole), torch.Tensor)


def is_light(node: fx.Node, flat: FlatGraph) -> bool:
    """Computes no tensor: numbers, parts, containers, what is asked about a tensor."""
    if isinstance(flat.notes.values.get(node), torch.Tensor):
        return is_part(node, flat)
    if node.op == "call_method":
        return node.target in _QUERIES
    if node.op != "call_function" or node.target in (check, set_state, left):
        return False
    target: Any = node.target
    if bool(node.meta.get("is_size")) or isinstance(target, type) or target in (getattr, len, torch.Tensor.dim):
        return True
    return target is operator.getitem or target.__name__ == "structure_of"


def made_of(node: fx.Node) -> list[fx.Node]:
    """The nodes that it reads."""
    return list(node.all_input_nodes)
