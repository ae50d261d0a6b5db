"""Regions: matches as pure functions of their inputs; equal regions are one object."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn
from torch.fx.graph import CodeGen
from torch.fx.node import map_aggregate

from slapo_graph.effects import Effects
from slapo_graph.guards import fingerprint
from slapo_graph.leaves import is_changed, is_predefined
from slapo_graph.patterns.data import Attribute
from slapo_graph.patterns.functional import INPUT, Own, functional_call, input_of
from slapo_graph.protocol import Flag
from slapo_graph.specialization import graph_function
from slapo_graph.structure import is_plain
from slapo_graph.tracing.writer import empty_graph, placeholder

# The place of one call for several nodes: the nodes before it, and the nodes after it.


class CannotPlace(Exception):  # noqa: N818 - becomes an ApplyError
    """A match that cannot become one call."""

    def __init__(self, problem: str, hint: str | None = None) -> None:
        super().__init__(problem)
        self.problem, self.hint = problem, hint


def nodes_after(matched: Collection[fx.Node], effects: Effects) -> list[fx.Node]:
    """Return the nodes between the matched ones that must run after the match, in their order.

    The others between them run before it. Both keep their order.

    Args:
        matched: of one graph, in its order.
        effects: of that graph.

    Raises:
        CannotPlace: the match is not convex, or two nodes would be swapped that must not be.
    """
    first, last = matched[0], matched[-1]  # type: ignore[index]
    inside = set(matched)
    earlier: list[fx.Node] = []  # matched nodes so far
    after: list[fx.Node] = []
    reasons: dict[fx.Node, str] = {}  # why a node comes after the match without needing it
    node = first
    while True:
        if node in inside:
            back = next((value for value in node.all_input_nodes if value in reasons or value in after), None)
            if back is not None:
                raise CannotPlace(_why(node, back, reasons, earlier))
            for moved in after:
                problem = effects.conflict(moved, node)
                if problem is not None:
                    raise CannotPlace(problem)
            earlier.append(node)
        elif any(value in inside or value in after for value in node.all_input_nodes):
            after.append(node)
        else:
            problem = next(filter(None, (effects.conflict(one, node) for one in (*earlier, *after))), None)
            if problem is not None:
                reasons[node] = problem
                after.append(node)
        if node is last:
            return after
        node = node.next


def _why(node: fx.Node, back: fx.Node, reasons: dict[fx.Node, str], earlier: list[fx.Node]) -> str:
    """Explain why ``back``, which ``node`` needs, cannot be moved before the match."""
    stack, seen = [back], set()
    while stack:
        present = stack.pop()
        if present in reasons:
            return reasons[present]
        leaving = next((value for value in present.all_input_nodes if value in earlier), None)
        if leaving is not None:
            return f"the match is not convex: '{leaving}' (inside) -> '{back}' (outside) -> '{node}' (inside)"
        seen.add(present)
        stack.extend(value for value in present.all_input_nodes if value not in seen)
    raise AssertionError(f"'{back}' needs nothing of the match")


# Modules whose calls a rewrite removed: their hooks and wrappers must not get lost.


def refuse_changed(nodes: Sequence[fx.Node], module: nn.Module) -> Iterator[str]:
    """Yield the paths of the modules that ``nodes`` call.

    Raises:
        CannotPlace: one of them, or one below it, has hooks or another forward than its class's.
    """
    for node in nodes:
        if node.op != "call_module":
            continue
        path = str(node.target)
        called = module.get_submodule(path)
        for name, below in called.named_modules():
            if is_changed(below):
                place = f"{path}.{name}" if name else path
                raise CannotPlace(
                    f"'{node}' calls '{place}', which has hooks or a forward of its own that the rewrite would drop",
                    "rewrite before the step that changed it, or choose a match without it",
                )
        yield path


def settings_of(nodes: Sequence[fx.Node], module: nn.Module) -> tuple[Flag, ...]:
    """Return the plain attributes of the torch.nn modules that ``nodes`` call, as flags of the new call.

    Without the training mode, which decides between variants.
    """
    found: list[Flag] = []
    for node in nodes:
        if node.op != "call_module":
            continue
        path = str(node.target)
        called = module.get_submodule(path)
        if is_predefined(called):
            for name, value in vars(called).items():
                if not name.startswith("_") and name != "training" and is_plain(value):
                    found.append(Flag(tuple(path.split(".")), name, fingerprint(value)))
    return tuple(found)


@dataclass(frozen=True)
class TakenOut:
    """A match as a region, and how to call it.

    Args:
        region: the function; identical regions are one object.
        operands: its arguments, by position.
        flags: attributes of modules inlined in it.
        no_longer_called: paths of modules that the graph no longer calls.
        draws: whether it may use the RNG.
    """

    region: Callable[..., Any]
    operands: tuple[fx.Node | Attribute, ...]
    flags: tuple[Flag, ...]
    no_longer_called: tuple[str, ...]
    draws: bool


def take_out(
    nodes: Sequence[fx.Node],
    inputs: Sequence[Any],
    outputs: Sequence[fx.Node],
    module: nn.Module,
    effects: Effects,
    *,
    copied: Sequence[fx.Node] = (),
) -> TakenOut:
    """Return the region that computes ``outputs``.

    Args:
        nodes: of the match, in the graph's order.
        inputs: of the pattern; they come first among the operands.
        outputs: of the region: one value, or a tuple of several.
        module: the traced one, for modules that the nodes call.
        effects: of the graph.
        copied: operands that the nodes write to in place; the region writes to copies.
    """
    writer = _Writer(module)
    for operand in inputs:
        if isinstance(operand, fx.Node | Attribute):
            writer.slot(operand)
    for node in copied:
        writer.copy(node)
    for node in nodes:
        writer.add(node)
    results = tuple(writer.positions[node] for node in outputs)
    operands = tuple(operand for operand in writer.slots if operand in writer.used)
    key = writer.key(operands, results)
    region = _REGIONS.get(key)
    if region is None:
        region = _REGIONS[key] = _function(writer, operands, results)
    draws = any(effects.draws(node) for node in nodes)
    return TakenOut(region, operands, tuple(writer.flags), tuple(writer.no_longer_called), draws)


_KEPT = ("batch_norm", "instance_norm")
"""Functions that write to tensors of their module: it stays a call."""

_REGIONS: weakref.WeakValueDictionary[Any, Callable[..., Any]] = weakref.WeakValueDictionary()
"""Cached results by key, held weakly: a cache of a pure function, not a registry."""


@dataclass(frozen=True)
class _RegionCall:
    """One call of the region, with slots and positions in place of values."""

    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(hash=False)


@dataclass(frozen=True)
class _Slot:
    operand: Any


@dataclass(frozen=True)
class _Position:
    index: int


class _Writer:
    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.slots: list[fx.Node | Attribute] = []
        self.used: set[fx.Node | Attribute] = set()
        self.steps: list[_RegionCall] = []
        self.positions: dict[fx.Node, _Position] = {}
        self.flags: list[Flag] = []
        self.no_longer_called: list[str] = []

    def slot(self, operand: fx.Node | Attribute) -> _Slot:
        if operand not in self.slots:
            self.slots.append(operand)
        return _Slot(operand)

    def use(self, operand: fx.Node | Attribute) -> _Slot:
        self.used.add(operand)
        return self.slot(operand)

    def value(self, node: fx.Node) -> Any:
        return self.positions[node] if node in self.positions else self.use(node)

    def copy(self, node: fx.Node) -> None:
        self.steps.append(_RegionCall("call_method", "clone", (self.use(node),), {}))
        self.positions[node] = _Position(len(self.steps) - 1)

    def add(self, node: fx.Node) -> None:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self.value)
        if node.op == "call_module":
            self._add_module(node, args, kwargs)
        else:
            self.steps.append(_RegionCall(node.op, node.target, args, kwargs))
        self.positions[node] = _Position(len(self.steps) - 1)

    def _add_module(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        path = str(node.target)
        below = self.module.get_submodule(path)
        single_call, given = functional_call(below), input_of(below, args, kwargs)
        if single_call is None or not given or single_call.name in _KEPT:
            self.steps.append(_RegionCall("call_method", "__call__", (self.use(Attribute(path)), *args), kwargs))
            return

        def here(value: Any) -> Any:
            if isinstance(value, Own):
                return self.use(Attribute(f"{path}.{value.name}"))
            return given[0] if value is INPUT else value

        self.no_longer_called.append(path)
        self.flags += settings_of([node], self.module)
        named = {name: here(value) for name, value in single_call.kwargs.items()}
        if "training" in named:  # the graph may be of another mode than the module is in now
            named["training"] = self.use(Attribute(f"{path}.training"))
        self.steps.append(_RegionCall("call_function", single_call.function, tuple(map(here, single_call.args)), named))

    def key(self, operands: tuple[Any, ...], results: tuple[_Position, ...]) -> Any:
        order = {operand: index for index, operand in enumerate(operands)}
        steps = tuple(
            (step.op, _constant(step.target), _frozen(step.args, order), _frozen(step.kwargs, order))
            for step in self.steps
        )
        return len(operands), steps, results


def _function(
    writer: _Writer, operands: tuple[fx.Node | Attribute, ...], results: tuple[_Position, ...]
) -> Callable[..., Any]:
    graph = empty_graph()
    given = {operand: placeholder(graph, _label(operand)) for operand in operands}
    made: list[fx.Node] = []

    def real(value: Any) -> Any:
        if isinstance(value, _Slot):
            return given[value.operand]
        if isinstance(value, _Position):
            return made[value.index]
        return value

    for step in writer.steps:
        made.append(graph.create_node(step.op, step.target, *map_aggregate((step.args, step.kwargs), real)))
    values = tuple(made[position.index] for position in results)
    graph.output(values[0] if len(values) == 1 else values)
    graph.set_codegen(_PureCode())
    return graph_function(graph)


class _PureCode(CodeGen):
    """The code of a function that takes no module."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        return f"def forward({', '.join(free_vars)}){maybe_return_annotation}:"


def _label(operand: fx.Node | Attribute) -> str:
    return operand.name if isinstance(operand, fx.Node) else operand.path.replace(".", "_")


def _frozen(value: Any, order: dict[Any, int]) -> Any:
    """Return a hashable key, equal only for equal code."""
    if isinstance(value, _Slot):
        return ("operand", order[value.operand])
    if isinstance(value, _Position):
        return value
    if isinstance(value, tuple | list):
        return ("list" if isinstance(value, list) else "tuple", *(_frozen(part, order) for part in value))
    if isinstance(value, dict):
        return ("dict", *((key, _frozen(part, order)) for key, part in value.items()))
    if isinstance(value, slice):
        return ("slice", *(_frozen(part, order) for part in (value.start, value.stop, value.step)))
    return _constant(value)


def _constant(value: Any) -> Any:
    """Return a hashable key of a constant; 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    if isinstance(value, float | int | complex):
        return (type(value), repr(value))
    try:
        hash(value)
    except TypeError:
        return (type(value), repr(value))
    return value
