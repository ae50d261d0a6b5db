"""What comes closest to a pattern in a graph, and how it differs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from torch import fx

from slapo_graph.arguments import MISSING
from slapo_graph.patterns.data import Alternative, Attribute, Constant, PatternStep, StepResult, Wildcard
from slapo_graph.patterns.index import Indexed, IndexedCall
from slapo_graph.patterns.matcher import aligned, could_be, has_target, is_constant, pairs_of

_Part = tuple[frozenset[int], str | None]
"""Positions of the nodes that fit below a step at a node, and the first difference there; None if all fit."""


class _AnyPosition(dict[int, Any]):
    """Whatever position a step is looked up at, it may stand there: operands are compared one by one instead."""

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
    """The closest place for one alternative."""

    def __init__(self, alternative: Alternative, index: Indexed) -> None:
        self.alternative, self.index = alternative, index
        self.parts: dict[tuple[int, int], _Part] = {}

    def best(self) -> tuple[tuple[int, bool, int], str] | None:
        """How good the best place is (calls that fit, ...), and the sentence on it; None without any such call."""
        ranks = {
            (len(self.part(number, position)[0]), number in self.alternative.outputs, -position): (number, position)
            for number, step in enumerate(self.alternative.steps)
            for position, found in self.index.calls.items()
            if has_target(step, found)
        }
        return (max(ranks), self._sentence(*ranks[max(ranks)])) if ranks else None

    def part(self, number: int, position: int) -> _Part:
        """How far the alternative fits from step ``number`` down, if that stands at ``position``."""
        if (number, position) not in self.parts:
            self.parts[number, position] = self._part(self.alternative.steps[number], self.index.calls[position])
        return self.parts[number, position]

    def _part(self, step: PatternStep, found: IndexedCall) -> _Part:
        if not has_target(step, found):
            return frozenset(), f"{_where(found)} calls {_called(found)}, where the pattern has {_shown(step)}"
        rows = aligned(step, found)
        if rows is None:
            return frozenset(), _arguments(step, found)
        orders = [rows]
        if step.is_commutative and found.call is not None and found.call.is_commutative:
            (first, left, x), (second, right, y) = rows
            orders.append([(first, left, y), (second, right, x)])
        parts = [self._ordered(found, order) for order in orders]
        return max(parts, key=lambda part: (len(part[0]), part[1] is None))

    def _ordered(self, found: IndexedCall, rows: list[tuple[str, Any, Any]]) -> _Part:
        for name, operand, value in rows:
            if not could_be(operand, value, name, found, self.index, _AnyPosition()):
                return frozenset(), self._operand(found, name, operand, value)
        nodes, difference = frozenset([found.position]), None
        for inner, other in (pair for _, operand, value in rows for pair in pairs_of(operand, value)):
            if not isinstance(inner, StepResult):
                continue
            position = self.index.position[other]
            if position in self.index.calls:
                more, below = self.part(inner.step, position)
            else:
                wanted = _shown(self.alternative.steps[inner.step])
                more, below = frozenset(), f"'{other.name}' is an argument of the module, the pattern has {wanted}"
            nodes, difference = nodes | more, difference or below
        return nodes, difference

    def _sentence(self, number: int, position: int) -> str:
        nodes, difference = self.part(number, position)
        if not nodes:
            return str(difference)
        names = _listed([f"'{self.index.calls[each].node.name}'" for each in sorted(nodes)[:4]])
        total = len(self.alternative.steps)
        verb = "is" if len(nodes) == 1 else "are"
        head = f"{len(nodes)} of {total} call{'s' if total > 1 else ''} of the pattern {verb} there ({names})"
        if difference is None and number not in self.alternative.outputs:
            difference = self._users(number, self.index.calls[position])
        together = "an argument of the pattern would have to be different values, or is computed inside of the match"
        return f"{head}, but {difference or together}"

    def _users(self, number: int, found: IndexedCall) -> str:
        """What is wrong with those who use a node."""
        wanted = [
            _shown(step)
            for step in self.alternative.steps
            for _, operand in step.arguments
            if any(inner == StepResult(number) for inner, _ in pairs_of(operand, operand))
        ]
        users = [_called(self.index.calls[each]) for each in self.index.users.get(found.node, ())]
        used = _listed(users[:3]) or "nothing of the graph"
        return f"{_where(found)} goes into {used}, where the pattern has {_listed(wanted)}"

    def _operand(self, found: IndexedCall, name: str, operand: Any, value: Any) -> str:
        expected = _operand(operand)
        if isinstance(operand, StepResult):
            expected = f"the result of {_shown(self.alternative.steps[operand.step])}"
        if isinstance(operand, Wildcard) and operand.shape is not None and isinstance(value, Attribute):
            shape = tuple(getattr(self.index.tensor(value), "shape", ()))
            return f"{value} has shape {shape}, the pattern's '{operand.name}' {operand.shape}"
        return f"{_where(found)} has {name}={_value(value)}, where the pattern has {expected}"


def _arguments(step: PatternStep, found: IndexedCall) -> str:
    """Arguments that only one of both has."""
    if step.target.kind in ("any", "module"):
        count = len(found.values if step.target.kind == "any" else found.given)
        values = f"{count} value{'' if count == 1 else 's'}"
        return f"{_where(found)} is given {values}, the pattern has {len(step.arguments)}"
    given = found.given if found.call is None else found.call.arguments
    more = [f"{name}={_value(value)}" for name, value in given.items() if name not in dict(step.arguments)]
    if more:
        return f"{_where(found)} has {_listed(more)}, the pattern has not"
    less = [f"{name}={_operand(operand)}" for name, operand in step.arguments if name not in given]
    return f"{_where(found)} has no {_listed(less)}, as the pattern has"


def _where(found: IndexedCall) -> str:
    location = found.node.meta.get("location")
    line = f" ({Path(location[0]).name}:{location[1]})" if location and location[1] else ""
    return f"'{found.node.name}'{line}"


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


def _operand(operand: Any) -> str:
    if isinstance(operand, Constant):
        return repr(operand.value)
    if isinstance(operand, Wildcard):
        if operand.kind == "constant":
            return "any constant"
        kind = "a parameter" if operand.kind == "parameter" else "a value"
        return f"{kind} '{operand.name}'" if operand.name[0] != "_" else kind
    if isinstance(operand, StepResult):
        return "a value"
    return f"{len(operand)} values" if isinstance(operand, tuple) else "other parts"


def _value(value: Any) -> str:
    if isinstance(value, fx.Node):
        return f"'{value.name}'"
    if isinstance(value, tuple):
        return f"({', '.join(map(_value, value))})"
    if value is MISSING:
        return "nothing"
    return str(value) if isinstance(value, Attribute) or not is_constant(value) else repr(value)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""
