"""Actions on a match: a call of its transformed region, or of a replacement."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import fx, nn

from slapo_core.internals import children_of
from slapo_graph.effects import Effects, is_inert
from slapo_graph.patterns.data import Attribute
from slapo_graph.patterns.pattern import MatchedNodes
from slapo_graph.private import tree_map_only
from slapo_graph.protocol import Flag
from slapo_graph.rewriting.region import CannotPlace, refuse_changed, settings_of, take_out

# Functions that a rewritten graph calls, under a name that the printed graph shows.


class NamedCall:
    """A function under another name, as the target of a call.

    Args:
        function: the called one.
        name: in the printed graph: ``slapo_bias_gelu(x, bias)`` for ``"bias_gelu"``.
        draws: whether it may use the RNG; None if its side effects are unknown.
    """

    def __init__(self, function: Callable[..., Any], name: str, *, draws: bool | None = None) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = name
        self.__module__ = "slapo"
        if draws is not None:
            self.slapo_draws = draws

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NamedCall) and (other.function, other.__name__) == (self.function, self.__name__)

    def __hash__(self) -> int:
        return hash((self.function, self.__name__))


def target_for(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function as the target of a call, under ``name`` if code cannot name it."""
    module = getattr(function, "__module__", None) or ""
    own = getattr(function, "__name__", "")
    if module.partition(".")[0] in ("torch", "_operator"):
        return function
    is_named = isinstance(function, FunctionType) and "<" not in function.__qualname__ and own.isidentifier()
    return function if is_named else NamedCall(function, name)


# A replacement in another variant, whose match has other captures, e.g. a mask more or less.

Positional = tuple[str | int, ...]
Keywords = tuple[tuple[str, str | int], ...]
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def adapted(
    new: Callable[..., Any] | str, module: nn.Module, arguments: Positional, keywords: Keywords, place: MatchedNodes
) -> tuple[Positional, Keywords]:
    """Return the arguments of a call of ``new`` in ``place``, by position and by name.

    Captures that only this match has are passed by name. Captures that it lacks are omitted where ``new`` has a default
    for them. Alternatives of a pattern differ in their computation only by their captures.

    Args:
        new: the replacement: a function, or the path of a module.
        module: the traced one.
        arguments: passed by position.
        keywords: passed by name.
        place: the match, with the names of the captures where the replacement was first made.

    Raises:
        CannotPlace: ``new`` cannot be called so.
    """
    if place.captured_first is None:
        return arguments, keywords
    given = place.captured
    gained, lost = given - place.captured_first, place.captured_first - given
    if not gained and not lost:
        return arguments, keywords
    parameters = _parameters(module.get_submodule(new).forward if isinstance(new, str) else new)
    optional = {name for name, each in parameters.items() if each.default is not inspect.Parameter.empty}
    while arguments and arguments[-1] in lost and arguments[-1] in optional:
        arguments = arguments[:-1]
    kept = tuple((parameter, which) for parameter, which in keywords if which not in lost or parameter not in optional)
    passed = (*arguments, *(which for _, which in kept))
    if gained - parameters.keys() or any(which in lost or isinstance(which, int) for which in passed):
        raise CannotPlace(
            f"the match captured {_listed(place.captured_first)} where the replacement was made, and {_listed(given)} "
            f"there, which the replacement does not accept",
            "a function with parameters of these names, and defaults for those that may be absent",
        )
    return arguments, (*kept, *((name, name) for name in sorted(gained)))


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function in C
        return {}
    return {name: each for name, each in found.items() if each.kind in _BY_NAME}


def _listed(names: Collection[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "nothing"


@dataclass
class NewCall:
    """The call in the place of a match.

    Args:
        op: ``"call_function"`` or ``"call_module"``.
        target: of the call.
        args: nodes, :class:`~slapo_graph.patterns.data.Attribute` and constants.
        kwargs: the same, by name.
        then: converts its output to the results; None if the output is the result.
        results: nodes of the match that the results replace, in order; None: nodes used outside, in the graph's order.
        flags: further assumptions of the call, besides the graph's.
        no_longer_called: modules that the graph no longer calls.
    """

    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    then: Callable[..., Any] | None = None
    results: tuple[fx.Node, ...] | None = None
    flags: tuple[Flag, ...] = ()
    no_longer_called: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outline:
    """A call of the transformed region of a match.

    Args:
        transform: called once for each distinct region.
        name: of the call.
        made: the transformed regions.
    """

    transform: Callable[[Callable[..., Any]], Callable[..., Any]]
    name: str
    results_only: ClassVar[bool] = False
    made: dict[Callable[..., Any], NamedCall] = field(default_factory=dict, compare=False, repr=False)

    def call(
        self,
        place: MatchedNodes,
        nodes: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
        module: nn.Module,
        effects: Effects,
    ) -> NewCall:
        """Return the call that stands for ``nodes``, the computing nodes of ``place``.

        Raises:
            CannotPlace: the nodes cannot become one call.
        """
        copied = _written_operands(nodes, module, effects)
        taken = take_out(nodes, place.inputs, outputs, module, effects, copied=copied)
        target = self.made.get(taken.region)
        if target is None:
            target = NamedCall(self.transform(taken.region), self.name, draws=taken.draws)
            self.made[taken.region] = target
        return NewCall(
            "call_function", target, taken.operands, flags=taken.flags, no_longer_called=taken.no_longer_called
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"transform": self.transform, "name": self.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in {**state, "made": {}}.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Replacement:
    """A call of something else.

    Args:
        new: a function, or the path of a module below the traced one.
        arguments: names of captures, or numbers of inputs, by position.
        keywords: the same, by keyword.
        name: of the call.
        results: names of the captures that the results replace; empty: the values used outside, in the graph's order.
        then: converts the output of ``new`` to the results.
        undone: makes, for the traced module, a context in which the replaced modules can run; None: they always can.
        values: the number of values that ``new`` returns; None: any.
        results_only: values of a match that the graph only returns become None, except the last.
    """

    new: Callable[..., Any] | str
    arguments: tuple[str | int, ...]
    keywords: tuple[tuple[str, str | int], ...]
    name: str
    results: tuple[str, ...] = ()
    then: Callable[..., Any] | None = None
    undone: Callable[[nn.Module], AbstractContextManager[None]] | None = None
    values: int | None = None
    results_only: bool = False

    def call(
        self,
        place: MatchedNodes,
        nodes: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
        module: nn.Module,
        effects: Effects,
    ) -> NewCall:
        inside = set(nodes)
        _refuse_lasting_writes(nodes, module, effects)
        arguments, keywords = adapted(self.new, module, self.arguments, self.keywords, place)
        args = tuple(_operand(place, which, inside) for which in arguments)
        kwargs = {name: _operand(place, which, inside) for name, which in keywords}
        no_longer_called = tuple(refuse_changed(nodes, module))
        results = tuple(place.captures[name] for name in self.results) or None
        left = [node for node in outputs if results is not None and node not in results]
        if left:
            raise CannotPlace(
                f"the value of '{left[0]}' is used outside the match, and the replacement does not return it"
            )
        if results is None and self.values not in (None, len(outputs)):
            shown = ", ".join(f"'{node}'" for node in outputs)
            raise CannotPlace(
                f"{shown} are used outside of the match, where '{self.name}' gives {self.values} value(s)"
            )
        op, target = "call_module", self.new
        if not isinstance(self.new, str):
            op, target = "call_function", target_for(self.new, self.name)
        then = self.then
        if any(_is_written_later(node, effects) for node in outputs):
            then = functools.partial(_cloned, then)
        then = target_for(then, f"{self.name}_parts") if then is not None else None
        flags = settings_of(nodes, module)
        return NewCall(op, target, args, kwargs, then, results, flags=flags, no_longer_called=no_longer_called)


Action = Outline | Replacement
"""What replaces a match."""


@contextlib.contextmanager
def as_before(action: Action, module: nn.Module) -> Iterator[None]:
    """Undo an action on the traced module while the block runs, to record another variant."""
    undone, new = (action.undone, action.new) if isinstance(action, Replacement) else (None, None)
    with undone(module) if undone is not None else contextlib.nullcontext():
        if not isinstance(new, str) or new not in children_of(module):
            yield
            return
        # A forward that loops over all children must not meet the new one.
        children = dict(children_of(module))
        del children_of(module)[new]
        try:
            yield
        finally:
            children_of(module).clear()
            children_of(module).update(children)


def _is_written_later(output: fx.Node, effects: Effects) -> bool:
    """Return whether a later node writes to a value in place."""
    memory, waiting, seen = effects.roots(output), [output], {output}
    while waiting:
        for user in waiting.pop().users:
            if effects.writes(user) & memory:
                return True
            if user not in seen and effects.roots(user) & memory:
                seen.add(user)
                waiting.append(user)
    return False


def _cloned(then: Callable[[Any], Any] | None, value: Any) -> Any:
    """Return clones of a replacement's outputs, which the graph writes to and the replacement may keep for backward."""
    return tree_map_only(torch.Tensor, torch.clone, value if then is None else then(value))


def _operand(place: MatchedNodes, which: str | int, inside: set[fx.Node]) -> Any:
    if isinstance(which, int):
        if not 0 <= which < len(place.inputs):
            raise CannotPlace(f"the match has {len(place.inputs)} inputs, and no input {which}")
        found = place.inputs[which]
    elif which not in place.captures:
        known = ", ".join(map(repr, place.captures)) or "none"
        raise CannotPlace(f"the match has no capture '{which}'; it has {known}")
    else:
        found = place.captures[which]
    if not isinstance(found, fx.Node | Attribute):
        return found
    if found in inside:
        raise CannotPlace(f"'{which}' is computed inside the match (as '{found}') and cannot be passed")
    return found


def _written_operands(nodes: Sequence[fx.Node], module: nn.Module, effects: Effects) -> tuple[fx.Node, ...]:
    """Return the inputs that the match writes to in place; its region works on copies.

    Raises:
        CannotPlace: others read it later, or two inputs share its memory.
    """
    _refuse_lasting_writes(nodes, module, effects)
    inside = set(nodes)
    given = dict.fromkeys(value for node in nodes for value in node.all_input_nodes if value not in inside)
    copied: dict[fx.Node, None] = {}
    for node in nodes:
        written = effects.writes(node)
        operands = [value for value in given if effects.roots(value) & written]
        if len(operands) > 1:
            shown = " and ".join(f"'{value}'" for value in operands)
            raise CannotPlace(f"'{node}' may write in place to an input that the match receives twice: {shown}")
        if operands and "example" not in operands[0].meta:
            raise CannotPlace(f"'{node}' may write in place to a part of '{operands[0]}', an input of the match")
        copied.update(dict.fromkeys(operands))
    return tuple(copied)


def _refuse_lasting_writes(nodes: Sequence[fx.Node], module: nn.Module, effects: Effects) -> None:
    """Refuse matches that write in place to values which others read later."""
    inside = set(nodes)
    outside = Effects(effects.graph, module, fresh=inside)
    for node in nodes:
        written = effects.writes(node) - inside
        later = node.next
        while written and later.op != "root":
            is_read = later.op == "output" or not is_inert(later)
            if later not in inside and is_read and written & outside.reads(later):
                raise CannotPlace(f"'{node}' writes in place to what '{later}' reads outside of the match")
            later = later.next
        if any(not isinstance(root, fx.Node) for root in written):
            raise CannotPlace(f"'{node}' writes in place to an argument or a buffer of the module")
