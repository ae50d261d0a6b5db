"""The closest candidate for a pattern in a graph, and the first difference there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import fx

from slapo_graph.patterns.comparison import Row, argument_orders, could_be, has_target, is_constant, pairs_of
from slapo_graph.patterns.data import Alternative, Attribute, Constant, PatternStep, PatternValue, Wildcard
from slapo_graph.patterns.index import Indexed, IndexedCall

_Partial = tuple[frozenset[int], str | None]
"""Positions of the nodes that match below a step at a node, and the first difference there; None if all match."""


class _AnyPosition(dict[int, Any]):
    """Candidates of a step: every position, since operands are compared one by one instead."""

    def __missing__(self, step: int) -> Any:
        return self

    def __contains__(self, position: object) -> bool:
        return True


def nearest_miss(alternatives: tuple[Alternative, ...], index: Indexed) -> str | None:
    """Describe the closest candidate in one sentence; None for an empty graph.

    Args:
        alternatives: of a pattern that does not match.
        index: of the graph.
    """
    if not index.calls:
        return None
    found = [best for alternative in alternatives if (best := _Search(alternative, index).best()) is not None]
    if found:
        return max(found, key=lambda best: best[0])[1]
    wanted = dict.fromkeys(_shown(step) for alternative in alternatives for step in alternative.steps)
    present = Counter(_called(found) for found in index.calls.values() if _called(found) not in ("getattr", "getitem"))
    in_place = [f"{name}_" for name in wanted if f"{name}_" in present]
    written = f"; write {_listed(in_place)} in the pattern: the model writes in place" if in_place else ""
    return (
        f"no call of {_listed(list(wanted)[:4])} is in the graph, which calls "
        f"{_listed([name for name, _ in present.most_common(6)])}{written}"
    )


class _Search:
    """Search the closest place of one alternative."""

    def __init__(self, alternative: Alternative, index: Indexed) -> None:
        self.alternative, self.index = alternative, index
        self.partials: dict[tuple[int, int], _Partial] = {}

    def best(self) -> tuple[tuple[int, bool, int], str] | None:
        """Return the rank and the description of the best place; None without one."""
        ranks = {
            (len(self.partial(number, position)[0]), number in self.alternative.outputs, -position): (number, position)
            for number, step in enumerate(self.alternative.steps)
            for position, found in self.index.calls.items()
            if has_target(step, found)
        }
        return (max(ranks), self._sentence(*ranks[max(ranks)])) if ranks else None

    def partial(self, number: int, position: int) -> _Partial:
        """Return the part that matches from step ``number`` down, with that step at ``position``."""
        if (number, position) not in self.partials:
            self.partials[number, position] = self._partial(number, position)
        return self.partials[number, position]

    def _partial(self, number: int, position: int) -> _Partial:
        step, found = self.alternative.steps[number], self.index.calls[position]
        if not has_target(step, found):
            return frozenset(), _difference(found, _shown(step), _called(found))
        orders = argument_orders(step, found)
        if not orders:
            return frozenset(), _difference(found, _arguments(step.arguments), _arguments(_given(found)))
        partials = [self._in_order(found, rows) for rows in orders]
        return max(partials, key=lambda each: (len(each[0]), each[1] is None))

    def _in_order(self, found: IndexedCall, rows: list[Row]) -> _Partial:
        for name, operand, value in rows:
            if not could_be(operand, value, name, found, self.index, _AnyPosition()):
                return frozenset(), _difference(found, f"{name}={_text(operand)}", f"{name}={self._value(value)}")
        nodes, difference = frozenset([found.position]), None
        for inner, other in (pair for _, operand, value in rows for pair in pairs_of(operand, value)):
            if isinstance(inner, PatternValue):
                position = self.index.position[other]
                more, below = (
                    self.partial(inner.step, position)
                    if position in self.index.calls
                    else (frozenset(), self._no_call(inner, other))
                )
                nodes, difference = nodes | more, difference or below
        return nodes, difference

    def _no_call(self, operand: PatternValue, found: fx.Node) -> str:
        return f"wanted {_shown(self.alternative.steps[operand.step])}, found '{found.name}', an argument of the module"

    def _sentence(self, number: int, position: int) -> str:
        nodes, difference = self.partial(number, position)
        if difference is None and number not in self.alternative.outputs:
            found, steps = self.index.calls[position], self.alternative.steps
            wanted = [_shown(step) for step in steps if any(each == PatternValue(number) for each in _operands(step))]
            users = [_called(self.index.calls[each]) for each in self.index.users.get(found.node, ())]
            difference = _difference(found, f"a use in {_listed(wanted)}", _listed(users[:3]) or "none")
        if difference is None:
            difference = "one argument of the pattern has different values, or is computed inside of the match"
        names = _listed([f"'{self.index.calls[each].node.name}'" for each in sorted(nodes)[:4]])
        matched = f"{len(nodes)} of {len(self.alternative.steps)} calls match" + (f" ({names})" if nodes else "")
        return f"{matched}; first difference: {difference}"

    def _value(self, value: Any) -> str:
        shape = getattr(self.index.tensor(value), "shape", None) if isinstance(value, Attribute) else None
        return _text(value) if shape is None else f"{value} of shape {tuple(shape)}"


def _difference(found: IndexedCall, wanted: str, got: str) -> str:
    location = found.node.meta.get("location")
    line = f" ({Path(location[0]).name}:{location[1]})" if location and location[1] else ""
    return f"'{found.node.name}'{line}: wanted {wanted}, found {got}"


def _operands(step: PatternStep) -> Iterable[Any]:
    return (inner for _, operand in step.arguments for inner, _ in pairs_of(operand, operand))


def _given(found: IndexedCall) -> Iterable[tuple[str, Any]]:
    return (found.given if found.call is None else found.call.arguments).items()


def _arguments(arguments: Iterable[tuple[str, Any]]) -> str:
    return f"the arguments ({', '.join(f'{name}={_text(value)}' for name, value in arguments)})"


def _called(found: IndexedCall) -> str:
    if found.call is not None:
        return found.call.operation
    return f"the {found.class_name} '{found.path}'"


def _shown(step: PatternStep) -> str:
    target = step.target
    if target.kind == "any":
        return "any call"
    if target.kind == "module":
        return f"a module '{target.name}'"
    if target.kind == "where":
        return "a node that the predicate accepts"
    return target.name if target.kind == "call" else f"'{target.name}'"


def _text(value: Any) -> str:
    """Return an operand of a pattern, or a value of a graph, for messages."""
    if isinstance(value, Constant):
        return repr(value.value)
    if isinstance(value, Wildcard):
        kind = "any constant" if value.kind == "constant" else f"a {value.kind}"
        named = "" if value.name.startswith("_") or value.kind == "constant" else f" '{value.name}'"
        return f"{kind}{named}" + (f" of shape {value.shape}" if value.shape is not None else "")
    if isinstance(value, PatternValue):
        return "the result of a call"
    if isinstance(value, fx.Node):
        return f"'{value.name}'"
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    return repr(value) if is_constant(value) else str(value)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""
