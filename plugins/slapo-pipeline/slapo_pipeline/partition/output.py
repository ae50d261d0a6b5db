"""The model's output as pieces, which are tensors that stages make, and how to put them together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from slapo_core.tracing import FlatGraph, rebuild

__all__ = ["assembler", "spread"]


def spread(flat: FlatGraph) -> None:
    """Give the flat graph an output, and calls arguments, in which no container stands for its parts."""


def assembler(value: Any, flat: FlatGraph, pieces: dict[fx.Node, str]) -> Callable[[Mapping[str, Any]], Any]:
    """What makes the output of its pieces.

    Args:
        value: the argument of the graph's output.
        flat: the graph.
        pieces: filled with the nodes whose values are pieces, with their names.
    """
    if isinstance(value, fx.Node):
        return _of_node(value, flat, pieces)
    if isinstance(value, tuple | list):
        below = [assembler(part, flat, pieces) for part in value]
        return lambda given: rebuild(value, [part(given) for part in below])
    if isinstance(value, dict):
        keyed = {key: assembler(part, flat, pieces) for key, part in value.items()}
        return lambda given: {key: part(given) for key, part in keyed.items()}
    return lambda given: value


def _of_node(node: fx.Node, flat: FlatGraph, pieces: dict[fx.Node, str]) -> Callable[[Mapping[str, Any]], Any]:
    if isinstance(flat.notes.values.get(node), torch.Tensor):
        name = pieces.setdefault(node, node.name)
        return lambda given: given.get(name)
    if isinstance(node.target, type):
        cls = node.target
        args = [assembler(part, flat, pieces) for part in node.args]
        kwargs = {key: assembler(part, flat, pieces) for key, part in node.kwargs.items()}
        return lambda given: cls(*(part(given) for part in args), **{key: part(given) for key, part in kwargs.items()})
    raise NotImplementedError(f"{node}")
