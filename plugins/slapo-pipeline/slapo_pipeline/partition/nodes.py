"""What kind of node a node of the flat graph is: bound to its place, or made again wherever it is needed."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from slapo_core.tracing import FlatGraph, check, left, set_state

__all__ = ["is_check", "is_constructor", "is_given", "is_light", "is_part", "is_switch", "readers", "title"]

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


def is_constructor(node: fx.Node) -> bool:
    """Makes a container of its arguments: a dataclass, a named tuple."""
    return node.op == "call_function" and isinstance(node.target, type)


def is_part(node: fx.Node, flat: FlatGraph) -> bool:
    """Takes a part out of a container: of what a module returned, or of an argument."""
    if node.op != "call_function" or node.target not in (operator.getitem, getattr):
        return False
    whole = node.args[0]
    return isinstance(whole, fx.Node) and not isinstance(flat.values.get(whole), torch.Tensor)


def is_light(node: fx.Node, flat: FlatGraph) -> bool:
    """Computes no tensor: numbers, parts, containers, what is asked about a tensor."""
    if isinstance(flat.values.get(node), torch.Tensor):
        return is_part(node, flat)
    if node.op == "call_method":
        return node.target in _QUERIES
    if node.op != "call_function" or node.target in (check, set_state, left):
        return False
    target: Any = node.target
    if bool(node.meta.get("is_size")) or isinstance(target, type) or target in (getattr, len, torch.Tensor.dim):
        return True
    return target is operator.getitem or getattr(target, "__name__", "") == "structure_of"


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that get its value, in containers too; not those that only ask about it."""
    for user in node.users:
        if is_constructor(user):
            yield from readers(user)
        else:
            yield user


def title(node: fx.Node) -> str:
    """A name for its value: of a part, that of the whole with the key."""
    takes_out = (operator.getitem, getattr)
    whole = node.args[0] if node.op == "call_function" and node.target in takes_out else None
    if isinstance(whole, fx.Node) and (whole.op == "call_module" or whole.target in takes_out):
        return f"{title(whole)}_{''.join(letter if letter.isalnum() else '_' for letter in str(node.args[1]))}"
    return node.name
