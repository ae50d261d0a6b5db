"""Every place where a pattern stands, by trying everything."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import networkx
from networkx.algorithms.isomorphism import DiGraphMatcher

from .cases import ANY, COMMUTATIVE, Call, Case, Choice, Wild

__all__ = ["Place", "forms", "places"]

Place = tuple[int, frozenset[int], tuple[tuple[str, int], ...]]
"""Number of the form, positions in the graph, and what the wildcards are."""


def places(case: Case) -> list[Place]:
    """All of them, overlapping ones too."""
    graph = networkx.DiGraph()
    for position, call in case.calls.items():
        graph.add_node(position, call=call)
        graph.add_edges_from((operand, position) for operand in call.operands if operand in case.calls)
    found: set[Place] = set()
    for number, (steps, operands) in enumerate(forms(case)):
        wanted = networkx.DiGraph()
        for index, step in enumerate(steps):
            wanted.add_node(index, call=step)
            wanted.add_edges_from((each, index) for each in operands[index] if isinstance(each, int))
        matcher = DiGraphMatcher(graph, wanted, node_match=_may_be)
        for mapping in matcher.subgraph_monomorphisms_iter():
            where = {index: position for position, index in mapping.items()}
            for bound in _bindings(case, steps, operands, where):
                found.add((number, frozenset(where.values()), tuple(sorted(bound.items()))))
    return sorted(found, key=lambda place: (min(place[1]), place[0], sorted(place[1]), place[2]))


def _may_be(node: Any, wanted: Any) -> bool:
    call, step = node["call"], wanted["call"]
    if step.operation == "any":
        return len(call.operands) == len(step.operands)
    return bool(call.operation == step.operation and step.constant in (ANY, call.constant))


def _bindings(
    case: Case, steps: list[Call], operands: list[tuple[Any, ...]], where: dict[int, int]
) -> Iterator[dict[str, int]]:
    """What the wildcards may be if the steps stand ``where``."""
    orders = [
        [given, given[::-1]] if step.operation in COMMUTATIVE else [given]
        for step, given in ((step, case.calls[where[index]].operands) for index, step in enumerate(steps))
    ]
    for chosen in itertools.product(*orders):
        bound: dict[str, int] = {}
        pairs = [pair for index, order in enumerate(chosen) for pair in zip(operands[index], order, strict=True)]
        if all(
            where[operand] == value if isinstance(operand, int) else bound.setdefault(operand.name, value) == value
            for operand, value in pairs
        ) and not set(bound.values()) & set(where.values()):
            yield bound


def forms(case: Case) -> list[tuple[list[Call], list[tuple[Any, ...]]]]:
    """The pattern without choices: its calls, and the operands of each, calls by their number.

    Those with the earlier alternatives come first, where the choice met first (from the first output down, operand by
    operand) counts most.
    """
    made = []
    pending: list[tuple[int, ...]] = [()]
    while pending:
        resolving = _Resolving(pending.pop(0))
        for output in case.outputs:
            resolving.resolve(output)
        if resolving.open is None:
            made.append((resolving.steps, resolving.operands))
        else:
            pending = [(*resolving.given, each) for each in range(resolving.open)] + pending
    return made


class _Resolving:
    """One form: choices are taken as given, in the order in which they are met.

    Args:
        given: which alternative of each.
    """

    def __init__(self, given: tuple[int, ...]) -> None:
        self.given = given
        self.met = 0
        self.open: int | None = None  # how many alternatives the first choice has that is not given
        self.steps: list[Call] = []
        self.operands: list[tuple[Any, ...]] = []
        self._made: dict[int, Any] = {}

    def resolve(self, value: Any) -> Any:
        if isinstance(value, Wild) or self.open is not None:
            return value
        if id(value) not in self._made:
            self._made[id(value)] = self._choice(value) if isinstance(value, Choice) else self._call(value)
        return self._made[id(value)]

    def _choice(self, choice: Choice) -> Any:
        self.met += 1
        if self.met > len(self.given):
            self.open = len(choice.alternatives)
            return None
        return self.resolve(choice.alternatives[self.given[self.met - 1]])

    def _call(self, call: Call) -> int:
        below = tuple(self.resolve(each) for each in call.operands)
        self.steps.append(call)
        self.operands.append(below)
        return len(self.steps) - 1
