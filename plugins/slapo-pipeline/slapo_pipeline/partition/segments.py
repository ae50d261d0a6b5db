"""Divide the flat graph into the graphs of the stages, with their inputs, writes and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from slapo_core.internals import buffers_of
from slapo_graph.flat import (
    FlatGraph,
    Opaque,
    check,
    children,
    concrete,
    empty_graph,
    is_plain,
    placeholder,
    rebuild,
    set_state,
)
from slapo_pipeline.partition.placement import (
    Constants,
    NodePlacement,
    Uncuttable,
    is_constructor,
    is_given,
    is_part,
    made_object,
    readers,
)
from slapo_pipeline.private import NormBase


class Segment:
    """Build the graph of one stage.

    Args:
        index: of the stage.

    Attributes:
        known: flat-graph node -> its counterpart in this stage: a node, a constant, or a container of them.
        sources: placeholder -> its argument: ``("input", parameter)``, ``("captured", number)``, ``("constant",
            object)``, ``("value", node)``, or ``("grad", None)`` for the grad mode of the caller.
        uses: nodes of earlier stages whose values this stage receives.
        makes: nodes whose values this stage sends or returns.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.graph = empty_graph()
        self.known: dict[fx.Node, Any] = {}
        self.sources: dict[fx.Node, tuple[str, Any]] = {}
        self.uses: dict[fx.Node, fx.Node] = {}
        self.makes: dict[fx.Node, Any] = {}
        self._grad: fx.Node | None = None

    def given(self, node: fx.Node, captured: int | None) -> fx.Node:
        """Add a placeholder for an argument of the model, or for a captured tensor."""
        source = ("input", str(node.meta["parameter"])) if captured is None else ("captured", captured)
        return self._placeholder(node.name, source)

    def hold(self, value: Any) -> fx.Node:
        """Add a placeholder for an object that exists before the model is called."""
        for node, (kind, what) in self.sources.items():
            if kind == "constant" and what is value:
                return node
        return self._placeholder(f"object_{len(self.sources)}", ("constant", value))

    def receive(self, node: fx.Node) -> fx.Node:
        """Add a placeholder for a value of an earlier stage."""
        self.uses[node] = self._placeholder(node.name, ("value", node))
        return self.uses[node]

    def switch(self, grad: bool, autocast: Any, cache: bool) -> None:
        """Switch grad mode and autocast; under the caller's no_grad, gradients stay off."""
        if self._grad is None:
            self._grad = self._placeholder("gradients_enabled", ("grad", None))
        self.graph.call_function(set_state, (self._grad if grad else False, autocast, cache))

    def clone_first(self, node: fx.Node) -> None:
        """Replace a received value by a clone, made first."""
        received = self.uses[node]
        with self.graph.inserting_before(next(each for each in self.graph.nodes if each.op != "placeholder")):
            own = self.graph.call_method("clone", (received,))
        received.replace_all_uses_with(own, delete_user_cb=lambda user: user is not own)
        self.known[node] = own

    def _placeholder(self, name: str, source: tuple[str, Any]) -> fx.Node:
        first = next((node for node in self.graph.nodes if node.op != "placeholder"), None)
        if first is None:
            made = placeholder(self.graph, name)
        else:
            with self.graph.inserting_before(first):
                made = placeholder(self.graph, name)
        self.sources[made] = source
        return made


_LASTING = (FunctionType, BuiltinFunctionType, MethodType, type, torch.nn.Module)
"""Types of objects that no forward creates."""


class Segments:
    """Build the graphs of all stages.

    A call stays in the stage in which it was recorded. Nodes that compute no tensor are repeated wherever they are
    needed. A tensor of an earlier stage is received, unless every stage can recompute it cheaply.

    Args:
        flat: the graph.
        placement: the stage of each node.

    Raises:
        Uncuttable: a value that cannot be sent would cross a cut.
    """

    def __init__(self, flat: FlatGraph, placement: NodePlacement) -> None:
        self.flat, self.placement = flat, placement
        self.constants = Constants(flat, placement)
        self.segments = [Segment(index) for index in range(placement.count)]
        self._captured = {node: number for number, node in enumerate(flat.graph.nodes) if number < len(flat.captured)}
        self._expected: set[fx.Node] = set()
        self._owned: set[int] | None = None
        now = entry = flat.state
        stage = 0
        for node in list(flat.graph.nodes):
            position = placement.position[node]
            while stage < position:
                stage += 1
                if now != entry:
                    self.segments[stage].switch(*now)
            if node.target is set_state:
                now = tuple(node.args)
                self.segments[position].switch(*now)
            elif node.target is check:
                self._check(node, position)
            elif placement.is_bound(node):
                self._copy(node, position)

    def get(self, node: fx.Node, stage: int) -> Any:
        """Return the value of a node in a stage: computed, read, or received."""
        segment = self.segments[stage]
        if node not in segment.known:
            segment.known[node] = self._found(node, segment)
        return segment.known[node]

    def give(self, node: fx.Node) -> None:
        """Make a tensor an output of its stage."""
        home = self.segments[self.placement.home(node)]
        if node not in home.makes:
            home.makes[node] = self.get(node, home.index)

    def constant(self, node: fx.Node) -> Any:
        """Return a recorded plain value, guarded in the stage that computes it."""
        value = self.flat.values[node]
        if node not in self._expected and self.placement.is_made(node):
            self._expected.add(node)
            home = self.segments[self.placement.home(node)]
            number = self.flat.guard(str(node), value, node.meta.get("location"))
            home.graph.call_function(check, (self.get(node, home.index), value, number))
        return value

    # ----------------------------------------------------------------------------------------------------------

    def _check(self, node: fx.Node, position: int) -> None:
        """Place a guard at the producer of its value; `FlatGraph.require` checks guards on parameters."""
        asked = node.args[0]
        if isinstance(asked, fx.Node) and self._is_about_attributes(asked):
            return  # `FlatGraph.require` compares these, also on ranks without the parameters
        is_made = any(self.placement.is_made(read) for read in node.all_input_nodes)
        self._copy(node, self.placement.home(node) if is_made else position)

    def _is_about_attributes(self, node: fx.Node) -> bool:
        if node.op == "get_attr":
            return True
        is_asking = not is_given(node) and not self.placement.is_bound(node) and bool(node.all_input_nodes)
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
            return value  # a size of a parameter, which the stage may lack
        if not self.placement.is_made(node) or is_constructor(node):
            return self._copy(node, stage)
        home = self.placement.home(node)
        if home == stage and not self.placement.is_bound(node):
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
        """Return whether a stage can recompute a number from its own tensors."""
        if is_given(node) or node in segment.known:
            return True
        if self.placement.is_bound(node) or (is_part(node, self.flat) and self.flat.values.get(node) is not None):
            return False
        return all(self._is_there(read, segment) for read in node.all_input_nodes)

    def _no_tensor(self, node: fx.Node, value: Any, segment: Segment) -> Any:
        """Repeat a value of an earlier stage that is not a tensor: a number, or a container of received items."""
        if isinstance(value, Opaque) or node not in self.flat.values:
            raise self._cannot_pass(node, value, segment)
        if is_plain(value):
            return self.constant(node)
        parts = children(value)
        if parts is None:
            raise self._cannot_pass(node, value, segment)
        keys = [(how, key, concrete(part)) for how, key, part in parts]
        inner = [
            None if part is None else self.get(self.placement.part(node, how, key, part), segment.index)
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
        """Convert an argument that is not a node: a constant, or an object made before the call."""
        if is_plain(value) and not isinstance(value, Enum) and type(value).__module__ != "numpy":
            return value
        if is_plain(value) or isinstance(value, _LASTING):
            return segment.hold(value)
        if self._owned is None:
            owners = [vars(module) for module in self.flat.module.modules()]
            self._owned = {id(part) for own in owners for part in own.values()}
        if id(value) in self._owned:
            return segment.hold(value)
        raise made_object(value, self.placement.cuts[max(segment.index - 1, 0)], f"passed to '{node}'", node)

    def _device(self, device: torch.device, segment: Segment) -> Any:
        """Return the device of one of the stage's tensors: each rank has its own."""
        arguments = (node for node in self.flat.graph.nodes if node.op == "placeholder" and node not in self._captured)
        for node in (*segment.known, *arguments):
            value = self.flat.values.get(node)
            if isinstance(value, torch.Tensor) and node.op != "get_attr" and self.flat.device(node) == device:
                known = self.get(node, segment.index)
                return segment.graph.call_function(getattr, (known, "device"))
        return device

    def _cannot_pass(self, node: fx.Node, value: Any, segment: Segment) -> Uncuttable:
        cut = self.placement.cuts[segment.index - 1]
        if node not in self.flat.values:
            problem = f"'{node}' is made before it and used after it, and is not a tensor"
            return Uncuttable(cut, problem, "cut where only tensors pass", node.meta.get("location"))
        return made_object(value, cut, "made before it and used after it", node)


_HINT = "write `x = x + y` instead of `x += y` there, or cut elsewhere"


def settle_writes(segments: Segments, returned: Iterable[fx.Node]) -> None:
    """Clone received values that a stage writes to; refuse writes visible to others.

    A received value has memory of its own, so a write reaches only the stage's tensors in that memory.

    Args:
        segments: of all stages.
        returned: nodes whose values the model returns.

    Raises:
        Uncuttable: a write would have to reach another stage, or another tensor of the stage.
    """
    writes = _Writes(segments, frozenset(returned))
    for node, written in segments.flat.writes.items():
        for tensor in written:
            writes.settle(node, tensor)


def settle_shared_modules(segments: Segments) -> None:
    """Refuse a buffer that one stage changes and another stage uses.

    Raises:
        Uncuttable: a module that changes it is called on both sides of a cut, or code on the other side reads it.
    """
    flat, placement = segments.flat, segments.placement
    names = _changing(flat)
    if not names:
        return
    stages: dict[int, set[int]] = {}
    for node, position in placement.position.items():
        if node.op == "call_module":
            called: nn.Module = flat.module.get_submodule(str(node.target))
            for buffer in called.buffers():
                stages.setdefault(id(buffer), set()).add(position)
    hint = "cut so that all its calls lie in one stage, or give each side a module of its own"
    for number, name in names.items():
        if len(stages.get(number, ())) > 1:
            problem = f"'{name}' is written to by a module that is called on both sides of the cut"
            raise Uncuttable(placement.cuts[min(stages[number])], problem, hint)
    for segment in segments.segments:
        for node in segment.graph.nodes:
            read = id(_attribute(flat.module, str(node.target))) if node.op == "get_attr" else 0
            for writer in stages.get(read, set()) - {segment.index} if read in names else ():
                problem = f"'{names[read]}' is written to by a module on one side of the cut, and read on the other"
                raise Uncuttable(
                    placement.cuts[min(writer, segment.index)], problem, "cut so that both lie in one stage"
                )


def _changing(flat: FlatGraph) -> dict[int, str]:
    """Return the buffers that calls change, id -> name; running statistics have no version counter."""
    names = {}
    for path, module in flat.module.named_modules():
        running = isinstance(module, NormBase) and module.training
        for name, buffer in buffers_of(module).items():
            full = f"{path}.{name}" if path else name
            if buffer is not None and (running or full in flat.written):
                names[id(buffer)] = full
    return names


def _attribute(root: nn.Module, path: str) -> object:
    owner, _, name = path.rpartition(".")
    return getattr(root.get_submodule(owner), name)


class _Writes:
    def __init__(self, segments: Segments, returned: frozenset[fx.Node]) -> None:
        self.segments, self.flat, self.placement = segments, segments.flat, segments.placement
        self.returned = returned
        self.sharing: dict[int, list[fx.Node]] = {}
        for node, storage in self.flat.storages.items():
            if node in self.placement.order:  # others were dropped: nothing uses them
                self.sharing.setdefault(storage, []).append(node)

    def settle(self, node: fx.Node, written: fx.Node) -> None:
        """Check one write, by ``node``, to the memory of ``written``."""
        stage, order = self.placement.position[node], self.placement.order[node]
        origins = self._origins(written, stage)
        if len(origins) > 1:
            raise self._refusal(node, written, written, "may lie in the memory of several values")
        (origin,) = origins
        for other in self.sharing[self.flat.storages[written]]:
            is_older = self.placement.order[other] <= order
            for user in readers(other):
                position = self.placement.position[user]
                if other.op == "get_attr" and position != stage and user.op != "output":
                    raise self._refusal(node, written, other, f"is read in stage {position} too")
                if self.placement.order[user] < order:
                    continue
                if position == stage and other is not written and self._origins(other, stage) != origins:
                    raise self._refusal(node, written, other, "shares its memory, and is sent separately")
                is_sent = is_given(other) or self.placement.home(other) < stage
                if is_older and is_sent and position > stage and user.op != "output":
                    raise self._refusal(
                        node, written, other, f"is read in stage {position}, which receives the value before that write"
                    )
            is_returned = other in self.returned and is_older
            if is_returned and (self.placement.home(other) < stage):
                raise self._refusal(node, written, other, "is returned as it was before")
        segment = self.segments.segments[stage]
        if origin in segment.uses and segment.known[origin] is segment.uses[origin]:
            segment.clone_first(origin)

    def _origins(self, node: fx.Node, stage: int) -> frozenset[fx.Node]:
        """Return the sources of a tensor's memory in a stage: received values, arguments, calls."""
        if is_given(node) or self.placement.home(node) < stage:
            return frozenset([node])
        call = node
        while is_part(call, self.flat) and isinstance(call.args[0], fx.Node):
            call = call.args[0]
        storage = self.flat.storages.get(node)
        sources = [read for read in _inputs(call) if self.flat.storages.get(read) == storage]
        if not sources:
            return frozenset([call])
        return frozenset().union(*(self._origins(read, stage) for read in sources))

    def _refusal(self, node: fx.Node, written: fx.Node, other: fx.Node, problem: str) -> Uncuttable:
        stage = self.placement.position[node]
        cut = self.placement.cuts[min(max(self.placement.home(other), 0), len(self.placement.cuts) - 1)]
        cut = cut if stage > 0 else self.placement.cuts[0]
        return Uncuttable(
            cut,
            f"stage {stage} writes to '{written}' in place, and '{other}' {problem}",
            _HINT,
            node.meta.get("location"),
        )


def _inputs(call: fx.Node) -> Iterable[fx.Node]:
    """Yield a call's inputs, also inside containers made for it."""
    for read in call.all_input_nodes:
        yield read
        if isinstance(read.target, type):
            yield from _inputs(read)


Assemble = Callable[[Mapping[str, Any]], Any]


class Assembly:
    """Assemble the model's output from named tensors.

    Args:
        segments: of all stages.
        name: gives a value its name.

    Attributes:
        names: the nodes whose values are in the output, in the order of the output.
        assemble: see :class:`slapo_runtime.stages.partition.Output`.
    """

    def __init__(self, segments: Segments, name: Callable[[fx.Node], str]) -> None:
        self.segments, self._name = segments, name
        self.names: dict[fx.Node, str] = {}
        self._output = next(node for node in segments.flat.graph.nodes if node.op == "output")
        self.assemble = self._of(self._output.args[0])

    def _of(self, value: Any) -> Assemble:
        """Return the function that assembles an item of the output: a node, a constant, a container."""
        if isinstance(value, fx.Node):
            return self._of_node(value)
        if isinstance(value, tuple | list):
            kind, below = tuple if isinstance(value, tuple) else list, [self._of(part) for part in value]  # not fx's
            return lambda values: kind([part(values) for part in below])
        if isinstance(value, dict):
            named = {key: self._of(part) for key, part in value.items()}
            return lambda values: {key: part(values) for key, part in named.items()}
        if not is_plain(value) and not callable(value):
            raise made_object(value, self.segments.placement.cuts[-1], "which it returns", self._output)
        return lambda values: value

    def _of_node(self, node: fx.Node) -> Assemble:
        flat, placement = self.segments.flat, self.segments.placement
        value = flat.values.get(node)
        if isinstance(value, torch.Tensor):
            if node not in self.names:
                self.segments.give(node)
                self.names[node] = self._name(node)
            name = self.names[node]
            return lambda values: values.get(name)
        if is_constructor(node):
            args = [self._of(part) for part in node.args]
            kwargs = {key: self._of(part) for key, part in node.kwargs.items()}
            target: Any = node.target
            return lambda values: target(
                *[part(values) for part in args], **{key: part(values) for key, part in kwargs.items()}
            )
        parts = None if isinstance(value, Opaque) else children(value)
        if isinstance(value, Opaque) or node not in flat.values or (parts is None and not is_plain(value)):
            raise made_object(value, placement.cuts[-1], "which it returns", node)
        if parts is None:
            self.segments.constant(node)
            return lambda values: value
        below = [self._of_part(node, how, key, concrete(part)) for how, key, part in list(parts)]
        return lambda values: rebuild(value, [part(values) for part in below])

    def _of_part(self, container: fx.Node, how: str, key: Any, value: Any) -> Assemble:
        if value is None:
            return lambda values: None
        return self._of_node(self.segments.placement.part(container, how, key, value))
