"""The graph of every stage, made of the nodes of the flat one; what goes from one stage to a later one."""

from __future__ import annotations

from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from slapo_core.tracing import FlatGraph, Opaque, check, children, concrete, is_plain, rebuild
from slapo_pipeline.partition.constants import Constants
from slapo_pipeline.partition.nodes import is_check, is_constructor, is_given, is_part, is_switch
from slapo_pipeline.partition.objects import made_object
from slapo_pipeline.partition.places import Places, Uncuttable
from slapo_pipeline.partition.segment import Segment

__all__ = ["Segments"]


_LASTING = (FunctionType, BuiltinFunctionType, MethodType, type, torch.nn.Module)
"""Objects that no forward makes anew, by their kind."""


class Segments:
    """The graphs of all stages.

    A call stands in the stage in which it was recorded. What computes no tensor is computed wherever it is needed. A
    tensor of an earlier stage is received, unless it is made of constants, or read from the batch.

    Args:
        flat: the graph.
        places: which node belongs where.

    Raises:
        Uncuttable: something would have to pass a cut that cannot.
    """

    def __init__(self, flat: FlatGraph, places: Places) -> None:
        self.flat, self.places = flat, places
        self.constants = Constants(flat, places)
        self.segments = [Segment(index) for index in range(places.count)]
        self._captured = {node: number for number, node in enumerate(flat.graph.nodes) if number < len(flat.captured)}
        self._expected: set[fx.Node] = set()
        self._owned: set[int] | None = None
        now = entry = flat.state
        stage = 0
        for node in list(flat.graph.nodes):
            position = places.position[node]
            while stage < position:
                stage += 1
                if now != entry:
                    self.segments[stage].switch(*now)
            if is_switch(node):
                now = tuple(node.args)
                self.segments[position].switch(*now)
            elif is_check(node):
                self._check(node, position)
            elif places.is_bound(node):
                self._copy(node, position)

    def get(self, node: fx.Node, stage: int) -> Any:
        """The value of a node in a stage: computed there, read there, or received."""
        segment = self.segments[stage]
        if node not in segment.known:
            segment.known[node] = self._found(node, segment)
        return segment.known[node]

    def give(self, node: fx.Node) -> None:
        """Let the stage that makes a tensor give it."""
        home = self.segments[self.places.home(node)]
        if node not in home.makes:
            home.makes[node] = self.get(node, home.index)

    def constant(self, node: fx.Node) -> Any:
        """What a node gave that is no tensor: the stage that computes it checks that it is that again."""
        value = self.flat.values[node]
        if node not in self._expected and self.places.is_made(node):
            self._expected.add(node)
            home = self.segments[self.places.home(node)]
            number = self.flat.guard(str(node), value, node.meta.get("location"))
            home.graph.call_function(check, (self.get(node, home.index), value, number))
        return value

    # ----------------------------------------------------------------------------------------------------------

    def _check(self, node: fx.Node, position: int) -> None:
        """A guard is checked where what it asks about is made; one that asks about parameters, by nobody here."""
        asked = node.args[0]
        if isinstance(asked, fx.Node) and self._is_about_attributes(asked):
            return  # `FlatGraph.require` holds them to what they were, on ranks that do not have them too
        is_made = any(self.places.is_made(read) for read in node.all_input_nodes)
        self._copy(node, self.places.home(node) if is_made else position)

    def _is_about_attributes(self, node: fx.Node) -> bool:
        if node.op == "get_attr":
            return True
        is_asking = not is_given(node) and not self.places.is_bound(node) and bool(node.all_input_nodes)
        return is_asking and all(self._is_about_attributes(read) for read in node.all_input_nodes)

    def _copy(self, node: fx.Node, stage: int) -> fx.Node:
        segment = self.segments[stage]

        def here(part: Any) -> Any:
            return self.get(part, stage) if isinstance(part, fx.Node) else self._object(part, node, segment)

        args, kwargs = map_aggregate((node.args, node.kwargs), here)  # type: ignore[misc]
        made = segment.graph.create_node(node.op, node.target, args, dict(kwargs), node.name)
        segment.known[node] = made
        return made

    def _found(self, node: fx.Node, segment: Segment) -> Any:
        stage, value = segment.index, self.flat.values.get(node)
        if node.target is getattr and node.args[1] == "device":
            value = self.flat.device(node.all_input_nodes[0])
        if node.op == "placeholder":
            return segment.given(node, self._captured.get(node))
        if node.op == "get_attr":
            return segment.graph.get_attr(str(node.target))
        if isinstance(value, torch.device):
            return self._device(value, segment)
        if is_plain(value) and value is not None and self._is_about_attributes(node):
            return value  # a size of a parameter, which the stage need not hold for that
        if not self.places.is_made(node) or is_constructor(node):
            return self._copy(node, stage)
        home = self.places.home(node)
        if home == stage and not self.places.is_bound(node):
            return self._copy(node, stage)
        if home >= stage:
            raise AssertionError(f"'{node}' is read in stage {stage}, and made in stage {home}")
        if isinstance(value, torch.Tensor):
            if self.constants.is_constant(node):
                return self._copy(node, stage)
            self.give(node)
            return segment.receive(node)
        if self._is_there(node, segment):
            return self._copy(node, stage)
        return self._no_tensor(node, value, segment)

    def _is_there(self, node: fx.Node, segment: Segment) -> bool:
        """Whether a number can be computed again of tensors that the stage has anyway."""
        if is_given(node) or node in segment.known:
            return True
        if self.places.is_bound(node) or (is_part(node, self.flat) and self.flat.values.get(node) is not None):
            return False
        return all(self._is_there(read, segment) for read in node.all_input_nodes)

    def _no_tensor(self, node: fx.Node, value: Any, segment: Segment) -> Any:
        """Something else of an earlier stage: a number is what it was, a container is made again of its parts."""
        if isinstance(value, Opaque) or node not in self.flat.values:
            raise self._cannot_pass(node, value, segment)
        if is_plain(value):
            return self.constant(node)
        parts = children(value)
        if parts is None:
            raise self._cannot_pass(node, value, segment)
        keys = [(how, key, concrete(part)) for how, key, part in parts]
        inner = [
            None if part is None else self.get(self.places.part(node, how, key, part), segment.index)
            for how, key, part in keys
        ]
        if type(value) in (tuple, list, dict):
            return rebuild(value, inner)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return segment.graph.call_function(type(value), tuple(inner))
        if isinstance(value, tuple | list):
            return segment.graph.call_function(type(value), (inner,))
        named = {str(key): part for (_, key, _), part in zip(keys, inner, strict=True)}
        return segment.graph.call_function(type(value), (), named)

    def _object(self, value: Any, node: fx.Node, segment: Segment) -> Any:
        """An argument that is no node: a constant, or an object that is there before the model is called."""
        if is_plain(value) and not isinstance(value, Enum) and type(value).__module__ != "numpy":
            return value
        if is_plain(value) or isinstance(value, _LASTING):
            return segment.hold(value)
        if self._owned is None:
            owners = [vars(module) for module in self.flat.module.modules()]
            self._owned = {id(part) for own in owners for part in own.values()}
        if id(value) in self._owned:
            return segment.hold(value)
        raise made_object(value, self.places.cuts[max(segment.index - 1, 0)], f"passed to '{node}'", node)

    def _device(self, device: torch.device, segment: Segment) -> Any:
        """That of any tensor that the stage has: it runs elsewhere on another rank."""
        arguments = (node for node in self.flat.graph.nodes if node.op == "placeholder" and node not in self._captured)
        for node in (*segment.known, *arguments):
            value = self.flat.values.get(node)
            if isinstance(value, torch.Tensor) and node.op != "get_attr" and self.flat.device(node) == device:
                known = self.get(node, segment.index)
                return segment.graph.call_function(getattr, (known, "device"))
        return device

    def _cannot_pass(self, node: fx.Node, value: Any, segment: Segment) -> Uncuttable:
        cut = self.places.cuts[segment.index - 1]
        if node not in self.flat.values:
            problem = f"'{node}' is made before it and used after it, and is no tensor"
            return Uncuttable(cut, problem, "cut where only tensors pass", node.meta.get("location"))
        return made_object(value, cut, "made before it and used after it", node)
