"""The model's output as pieces, which are tensors that stages make, and how to put them together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from slapo_core.tracing import Opaque, children, concrete, is_plain, rebuild
from slapo_pipeline.partition.nodes import is_constructor
from slapo_pipeline.partition.objects import made_object
from slapo_pipeline.partition.segments import Segments

__all__ = ["Assembly"]

Assemble = Callable[[Mapping[str, Any]], Any]


class Assembly:
    """How the output is put together.

    Args:
        segments: of all stages.
        name: gives a value its name.

    Attributes:
        pieces: the nodes whose values are pieces, in the order of the output.
        assemble: see :class:`slapo_core.spec.pipeline.Output`.
    """

    def __init__(self, segments: Segments, name: Callable[[fx.Node], str]) -> None:
        self.segments, self._name = segments, name
        self.pieces: dict[fx.Node, str] = {}
        self._output = next(node for node in segments.flat.graph.nodes if node.op == "output")
        self.assemble = self._of(self._output.args[0])

    def _of(self, value: Any) -> Assemble:
        """For an argument of the graph's output: a node, a constant, a container of such."""
        if isinstance(value, fx.Node):
            return self._of_node(value)
        if isinstance(value, tuple | list):
            return _sequence(value, [self._of(part) for part in value])
        if isinstance(value, dict):
            return _mapping({key: self._of(part) for key, part in value.items()})
        if not is_plain(value) and not callable(value):
            raise made_object(value, self.segments.places.cuts[-1], "which it returns", self._output)
        return lambda pieces: value

    def _of_node(self, node: fx.Node) -> Assemble:
        flat, places = self.segments.flat, self.segments.places
        value = flat.values.get(node)
        if isinstance(value, torch.Tensor):
            if node not in self.pieces:
                self.segments.give(node)
                self.pieces[node] = self._name(node)
            name = self.pieces[node]
            return lambda pieces: pieces.get(name)
        if is_constructor(node):
            args = [self._of(part) for part in node.args]
            kwargs = {key: self._of(part) for key, part in node.kwargs.items()}
            target: Any = node.target
            return lambda pieces: target(
                *[part(pieces) for part in args], **{key: part(pieces) for key, part in kwargs.items()}
            )
        parts = None if isinstance(value, Opaque) else children(value)
        if isinstance(value, Opaque) or node not in flat.values or (parts is None and not is_plain(value)):
            raise made_object(value, places.cuts[-1], "which it returns", node)
        if parts is None:
            self.segments.constant(node)
            return lambda pieces: value
        below = [self._of_part(node, how, key, concrete(part)) for how, key, part in list(parts)]
        return lambda pieces: rebuild(value, [part(pieces) for part in below])

    def _of_part(self, whole: fx.Node, how: str, key: Any, value: Any) -> Assemble:
        if value is None:
            return lambda pieces: None
        return self._of_node(self.segments.places.part(whole, how, key, value))


def _sequence(value: Any, below: list[Assemble]) -> Assemble:
    kind = tuple if isinstance(value, tuple) else list  # and not fx's own
    return lambda pieces: kind([part(pieces) for part in below])


def _mapping(below: dict[Any, Assemble]) -> Assemble:
    return lambda pieces: {key: part(pieces) for key, part in below.items()}
