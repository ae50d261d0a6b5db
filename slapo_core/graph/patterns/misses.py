"""What comes closest to a pattern in a graph, and how it differs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

from slapo_core.graph.patterns.data import Attribute, Constant, Form, Result, Step, Wildcard
from slapo_core.graph.patterns.index import Indexed, IndexedCall
from slapo_core.graph.patterns.matcher import MISSING, aligned, could_be, has_target, is_constant, pairs_of


@dataclass(frozen=True)
class _Part:
    """How far the calls below one step stand below one node.

    Args:
        nodes: that fit.
        difference: the first one; None if all fit.
    """

    nodes: tuple[int, ...] = ()
    difference: str | None = None


class _Everywhere:
    """Whatever position a step is looked up at, it may stand there: operands are compared one by one instead."""

    def __contains__(self, position: object) -> bool:
        return True


class _AllSteps(dict[int, Any]):
    def __missing__(self, step: int) -> Any:
        return _Everywhere()


def nearest_miss(forms: tuple[Form, ...], index: Indexed) -> str | None:
    """One sentence on the place where most calls of a form stand; None if the graph has no calls.

    Args:
        forms: of a pattern that does not match.
        index: of the graph.
    """
    if not index.calls:
        return None
    best: tuple[tuple[int, int, int], Form, str] | None = None
    for form in forms:
        found = _Search(form, index).best()
        if found is not None and (best is None or found[0] > best[0]):
            best = (found[0], form, found[1])
    if best is not None:
        return best[2]
    wanted = dict.fromkeys(_shown(step) for form in forms for step in form.steps)
    present = Counter(_called(found) for found in index.calls.values() if _called(found) not in ("getattr", "getitem"))
    in_place = [f"{name}_" for name in wanted if f"{name}_" in present]
    written = f"; write {_listed(in_place)} in the pattern: the model writes in place" if in_place else ""
    return (
        f"no call of {_listed(list(wanted)[:4])} is in the graph, which calls "
        f"{_listed([name for name, _ in present.most_common(6)])}{written}"
    )


class _Search:
    """The closest place for one form."""

    def __init__(self, form: Form, index: Indexed) -> None:
        self.form, self.index = form, index
        self.parts: dict[tuple[int, int], _Part] = {}
        self.consumers: dict[int, list[int]] = {}
        for number, step in enumerate(form.steps):
            for _, each in step.arguments:
                for operand, _ in pairs_of(each, each):
                    if isinstance(operand, Result):
                        self.consumers.setdefault(operand.step, []).append(number)

    def best(self) -> tuple[tuple[int, int, int], str] | None:
        """How good the best place is (calls that fit, ...), and the sentence on it."""
        best: tuple[tuple[int, int, int], int, int] | None = None
        for number in range(len(self.form.steps)):
            for position, found in self.index.calls.items():
                if not has_target(self.form.steps[number], found):
                    continue
                part = self.part(number, position)
                count = len(set(part.nodes))
                key = (count, int(number in self.form.outputs), -position)
                if count and (best is None or key > best[0]):
                    best = (key, number, position)
        if best is None:
            return self._other_arguments()
        key, number, position = best
        return key, self._sentence(number, position)

    def part(self, number: int, position: int) -> _Part:
        """How far the form fits from step ``number`` down, if that stands at ``position``."""
        known = self.parts.get((number, position))
        if known is None:
            known = self.parts[number, position] = self._part(number, self.index.calls[position])
        return known

    def _part(self, number: int, found: IndexedCall) -> _Part:
        step = self.form.steps[number]
        if not has_target(step, found):
            return _Part((), f"{self._where(found)} calls {_called(found)}, where the pattern has {_shown(step)}")
        rows = aligned(step, found)
        if rows is None:
            return _Part((), self._arguments(step, found))
        orders = [rows]
        if step.is_commutative and found.call is not None and found.call.is_commutative:
            (first, left, x), (second, right, y) = rows
            orders.append([(first, left, y), (second, right, x)])
        return max((self._ordered(step, found, order) for order in orders), key=_rank)

    def _ordered(self, step: Step, found: IndexedCall, rows: list[tuple[str, Any, Any]]) -> _Part:
        nodes: list[int] = [found.position]
        difference = None
        for name, operand, value in rows:
            if not could_be(operand, value, name, found, self.index, _AllSteps()):
                return _Part((), self._operand(found, name, operand, value))
        for _, operand, value in rows:
            for inner, other in pairs_of(operand, value):
                if not isinstance(inner, Result):
                    continue
                position = self.index.position[other]
                if position not in self.index.calls:
                    below = _Part(
                        (),
                        f"'{other.name}', which {self._where(found)} uses, is an argument of the module, "
                        f"where the pattern has {_shown(self.form.steps[inner.step])}",
                    )
                else:
                    below = self.part(inner.step, position)
                nodes += below.nodes
                difference = difference or below.difference
        return _Part(tuple(nodes), difference)

    def _other_arguments(self) -> tuple[tuple[int, int, int], str] | None:
        """For a form none of whose calls is there with its arguments: one with others."""
        for number, step in reversed(list(enumerate(self.form.steps))):
            for position, found in self.index.calls.items():
                if has_target(step, found):
                    return (0, 0, -position), str(self.part(number, position).difference)
        return None

    def _sentence(self, number: int, position: int) -> str:
        part = self.part(number, position)
        nodes = sorted(set(part.nodes))
        names = _listed([f"'{self.index.calls[each].node.name}'" for each in nodes[:4]])
        total = len(self.form.steps)
        verb = "is" if len(nodes) == 1 else "are"
        head = f"{len(nodes)} of {total} call{'s' if total > 1 else ''} of the pattern {verb} there ({names})"
        difference = part.difference
        if difference is None and number not in self.form.outputs:
            difference = self._users(number, position)
        return f"{head}, but {difference or self._together(nodes)}"

    def _users(self, number: int, position: int) -> str:
        """What is wrong with those who use the node at ``position``."""
        found = self.index.calls[position]
        wanted = _listed([_shown(self.form.steps[consumer]) for consumer in self.consumers.get(number, [])])
        users = [self.index.calls[each] for each in self.index.users.get(found.node, ())]
        for consumer in self.consumers.get(number, []):
            for user in users:
                part = self.part(consumer, user.position)
                if has_target(self.form.steps[consumer], user) and part.difference is not None:
                    return part.difference
        used = _listed([_called(user) for user in users[:3]]) or "nothing of the graph"
        return f"{self._where(found)} goes into {used}, where the pattern has {wanted}"

    def _together(self, nodes: list[int]) -> str:
        if len(nodes) < len(self.form.steps):
            return (
                "calls of the pattern would have to share a node, or its other results do not go with this one: "
                "an argument of the pattern stands for one value only"
            )
        repeated = Counter(
            operand.name
            for step in self.form.steps
            for _, each in step.arguments
            for operand, _ in pairs_of(each, each)
            if isinstance(operand, Wildcard)
        )
        names = _listed([f"'{name}'" for name, count in repeated.items() if count > 1 and name[0] != "_"])
        if not names:
            return "they do not belong together: an argument of the pattern would be computed inside of it"
        return f"{names} would have to be different values in different places"

    def _arguments(self, step: Step, found: IndexedCall) -> str:
        """Arguments that only one of both has."""
        given = found.given if step.target.kind == "module" or found.call is None else found.call.arguments
        ours = {name for name, _ in step.arguments}
        more = [f"{name}={_value(value)}" for name, value in given.items() if name not in ours]
        if step.target.kind in ("any", "module"):
            count = len(found.values) if step.target.kind == "any" else len(found.given)
            return (
                f"{self._where(found)} is given {count} value{'' if count == 1 else 's'}, the pattern has {len(ours)}"
            )
        if more:
            return f"{self._where(found)} has {_listed(more)}, the pattern has not"
        less = [f"{name}={_operand(operand)}" for name, operand in step.arguments if name not in given]
        return f"{self._where(found)} has no {_listed(less)}, as the pattern has"

    def _operand(self, found: IndexedCall, name: str, operand: Any, value: Any) -> str:
        expected = _operand(operand)
        if isinstance(operand, Result):
            expected = f"the result of {_shown(self.form.steps[operand.step])}"
        if isinstance(operand, Wildcard) and operand.shape is not None and isinstance(value, Attribute):
            shape = tuple(getattr(self.index.tensor(value), "shape", ()))
            return f"{value} has shape {shape}, the pattern's '{operand.name}' {operand.shape}"
        return f"{self._where(found)} has {name}={_value(value)}, where the pattern has {expected}"

    def _where(self, found: IndexedCall) -> str:
        location = found.node.meta.get("location")
        line = f" ({Path(location[0]).name}:{location[1]})" if location and location[1] else ""
        return f"'{found.node.name}'{line}"


def _rank(part: _Part) -> tuple[int, bool]:
    return len(set(part.nodes)), part.difference is None


def _called(found: IndexedCall) -> str:
    if found.call is not None:
        return found.call.operation
    return f"the {found.class_name} '{found.path}'"


def _shown(step: Step) -> str:
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
    if isinstance(operand, Result):
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
