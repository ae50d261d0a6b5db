"""The graph of every stage, made of the nodes of the flat one; what goes from one stage to a later one."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from slapo_core.tracing import FlatGraph, Opaque, check, set_state
from slapo_pipeline.partition.constants import Constants
from slapo_pipeline.partition.nodes import is_check, is_given, is_part, is_switch
from slapo_pipeline.partition.places import Places, Uncuttable

__all__ = ["GRAD", "Segment", "Segments"]

GRAD = "gradients_enabled"
"""The placeholder of a stage's graph for whether gradients are taken outside."""


class Segment:
    """The graph of one stage in the making.

    Attributes:
        inputs: arguments of the model that it reads, by placeholder.
        captured: numbers of the captured tensors that it reads.
        uses: nodes of earlier stages whose values it reads.
        makes: nodes whose values it gives.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.graph = fx.Graph()
        self.known: dict[fx.Node, Any] = {}
        self.inputs: dict[str, fx.Node] = {}
        self.captured: dict[int, fx.Node] = {}
        self.uses: dict[fx.Node, fx.Node] = {}
        self.makes: dict[fx.Node, fx.Node] = {}
        self.grad: fx.Node | None = None
        self.expected: dict[fx.Node, Any] = {}

    def placeholder(self, name: str) -> fx.Node:
        first = next((node for node in self.graph.nodes if node.op != "placeholder"), None)
        if first is None:
            return self.graph.placeholder(name)
        with self.graph.inserting_before(first):
            return self.graph.placeholder(name)


class Segments:
    """All stages.

    Args:
        flat: the graph; its output is made of parts already.
        places: which node belongs where.
    """

    def __init__(self, flat: FlatGraph, places: Places) -> None:
        self.flat, self.places = flat, places
        self.constants = Constants(flat, places)
        self.segments = [Segment(index) for index in range(places.count)]
        self.numbers: list[tuple[Any, tuple[str, int] | None]] = []
        self._captured = {
            node: number
            for number, node in enumerate(flat.recorded.graph.nodes)
            if number < len(flat.recorded.captured)
        }
        self._build()

    def _build(self) -> None:
        state, entry = self.flat.state, self.flat.state
        stage = 0
        for node in self.flat.recorded.graph.nodes:
            position = self.places.position[node]
            while stage < position:
                stage += 1
                if state != entry:
                    self._switch(self.segments[stage], *state)
            if is_switch(node):
                state = tuple(node.args)
                self._switch(self.segments[position], *state)
            elif is_check(node):
                reads = any(self._is_made(read) for read in node.all_input_nodes)
                self._copy(node, self.places.home(node) if reads else position)
            elif self.places.is_bound(node):
                self._copy(node, position)

    def _is_made(self, node: fx.Node) -> bool:
        """Whether it is computed of more than what every stage has."""
        if is_given(node):
            return False
        return self.places.is_bound(node) or any(self._is_made(read) for read in node.all_input_nodes)

    def _switch(self, segment: Segment, grad: bool, autocast: Any, cache: bool) -> None:
        if segment.grad is None:
            segment.grad = segment.placeholder(GRAD)
        segment.graph.call_function(set_state, (segment.grad if grad else False, autocast, cache))

    def _copy(self, node: fx.Node, stage: int) -> fx.Node:
        segment = self.segments[stage]
        made = segment.graph.node_copy(node, lambda read: self.get(read, stage))
        segment.known[node] = made
        return made

    def get(self, node: fx.Node, stage: int) -> Any:
        """The value of a node in a stage: computed there, read there, or received."""
        segment = self.segments[stage]
        if node in segment.known:
            return segment.known[node]
        if node.op == "placeholder":
            made = self._given(node, segment)
        elif node.op == "get_attr":
            made = segment.graph.get_attr(str(node.target))
        elif self.places.is_bound(node) or (is_part(node, self.flat) and self.places.home(node) < stage):
            made = self._received(node, segment)
        elif self._is_there(node, stage):
            made = self._copy(node, stage)
        else:
            made = self._remembered(node, segment)
        segment.known[node] = made
        return made

    def _given(self, node: fx.Node, segment: Segment) -> fx.Node:
        number = self._captured.get(node)
        made = segment.placeholder(node.name)
        if number is None:
            segment.inputs[str(node.target)] = made
        else:
            segment.captured[number] = made
        return made

    def _received(self, node: fx.Node, segment: Segment) -> Any:
        """A value of an earlier stage."""
        home = self.places.home(node)
        if home >= segment.index:
            raise AssertionError(f"'{node}' is read before it is made")
        value = self.flat.notes.values.get(node)
        if isinstance(value, torch.Tensor):
            if self.constants.is_constant(node):
                return self._copy(node, segment.index)
            if is_part(node, self.flat) and not self._is_made(node):
                return self._copy(node, segment.index)
            self.give(node)
            made = segment.placeholder(node.name)
            segment.uses[node] = made
            return made
        if isinstance(value, Opaque):
            if not self._is_made(node):
                return self._copy(node, segment.index)
            raise self._opaque(node, value, segment)
        if not self._is_made(node):
            return self._copy(node, segment.index)
        return self._remembered(node, segment)

    def give(self, node: fx.Node) -> None:
        """Let the stage that makes a value give it."""
        home = self.segments[self.places.home(node)]
        if node not in home.makes:
            home.makes[node] = self.get(node, home.index)

    def _is_there(self, node: fx.Node, stage: int) -> bool:
        """Whether a node that computes no tensor can be computed again of what the stage has."""
        if is_given(node) or node in self.segments[stage].known:
            return True
        value = self.flat.notes.values.get(node)
        if isinstance(node.target, type) or self.places.home(node) == stage:
            return True
        if self.places.is_bound(node) or (is_part(node, self.flat) and isinstance(value, torch.Tensor)):
            return False
        return all(self._is_there(read, stage) for read in node.all_input_nodes)

    def _remembered(self, node: fx.Node, segment: Segment) -> Any:
        """A number of an earlier stage: what it was in the recording, which that stage checks."""
        values = self.flat.notes.values
        if node not in values:
            raise Uncuttable(
                self.places.order[segment.index - 1],
                f"'{node}' cannot pass the cut",
                location=node.meta.get("location"),
            )
        value = values[node]
        if isinstance(value, torch.device):
            return self._device(value, segment)
        home = self.segments[self.places.home(node)]
        if node not in home.expected:
            home.expected[node] = value
            self.numbers.append((value, node.meta.get("location")))
            number = len(self.flat.recorded.guards) + len(self.numbers) - 1
            home.graph.call_function(check, (self.get(node, home.index), value, number))
        return value

    def _device(self, device: torch.device, segment: Segment) -> Any:
        """Of any tensor that the stage has on the same device."""
        values = self.flat.notes.values
        for node in [*segment.known, *(node for node in self.places.position if node.op == "placeholder")]:
            value = values.get(node)
            if isinstance(value, torch.Tensor) and value.device == device and node not in self._captured:
                return segment.graph.call_function(getattr, (self.get(node, segment.index), "device"))
        return device

    def _opaque(self, node: fx.Node, value: Opaque, segment: Segment) -> Uncuttable:
        kind = value.__class__.__name__
        hint = None
        if "Cache" in kind:
            hint = "pass use_cache=False with the batch, or set model.config.use_cache = False: training needs no cache"
        return Uncuttable(
            self.places.order[segment.index - 1],
            f"a {kind} ('{node}') is made before the cut and used after it, and only tensors can pass",
            hint,
            node.meta.get("location"),
        )
