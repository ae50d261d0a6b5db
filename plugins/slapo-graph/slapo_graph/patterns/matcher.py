"""The search for the alternatives of a pattern in a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from slapo_core.errors import ArgumentError
from slapo_graph.patterns.comparison import argument_orders, could_be, has_target, pairs_of
from slapo_graph.patterns.data import (
    Alternative,
    Attribute,
    Items,
    PatternStep,
    PatternValue,
    Slice,
    Wildcard,
)
from slapo_graph.patterns.index import Indexed, IndexedCall

# Interchangeable steps of an alternative, which are searched in one order only.


def twins(
    alternative: Alternative, wildcards: list[frozenset[str]], consumers: list[list[int]]
) -> dict[int, list[int]]:
    """Return for each step the steps that it could change places with.

    Nothing uses them, and they differ only in wildcards of their own.
    """
    count = Counter(name for names in wildcards for name in names)
    groups: dict[Any, list[int]] = {}
    for number, step in enumerate(alternative.steps):
        if consumers[number]:
            continue
        own = {name: f"_own_{index}" for index, name in enumerate(_met(step)) if count[name] == 1}
        arguments = tuple((name, _renamed(operand, own)) for name, operand in step.arguments)
        groups.setdefault((step.target, arguments, step.is_commutative), []).append(number)
    return {number: [each for each in group if each != number] for group in groups.values() for number in group}


def _met(step: PatternStep) -> list[str]:
    """Return the names of a step's wildcards, in the order of its arguments."""
    pairs = (pair for _, operand in step.arguments for pair in pairs_of(operand, operand))
    return list(dict.fromkeys(operand.name for operand, _ in pairs if isinstance(operand, Wildcard)))


def _renamed(operand: Any, names: dict[str, str]) -> Any:
    if isinstance(operand, Wildcard):
        return replace(operand, name=names.get(operand.name, operand.name))
    if isinstance(operand, Slice):
        return Slice(*(_renamed(part, names) for part in (operand.start, operand.stop, operand.step)))
    if isinstance(operand, Items):
        return Items(operand.keys, tuple(_renamed(part, names) for part in operand.values))
    return tuple(_renamed(part, names) for part in operand) if isinstance(operand, tuple) else operand


# Exact matching of one alternative in one graph.

MOST_STEPS = 300_000
Pairs = tuple[tuple[Any, Any], ...]
Embedding = tuple[tuple[int, ...], dict[str, Any]]
"""A place of an alternative in a graph: the position of each step's node, and the values of the wildcards."""


class AlternativeMatcher:
    """Search the places of one alternative in one graph.

    First the candidates of each step, without regard to shared wildcards; then exact placements among these. A partial
    placement that failed is not tried again.

    Args:
        alternative: of a pattern; the graph has each of its operations.
        index: of the graph.
    """

    def __init__(self, alternative: Alternative, index: Indexed) -> None:
        self.alternative, self.index = alternative, index
        self.tried = 0
        self.candidates: dict[int, dict[int, list[Pairs]]] = {}
        self._failed: set[Any] = set()
        self._needed: dict[frozenset[int], tuple[int, list[str], list[int]]] = {}
        self._near: dict[tuple[Any, int], list[int]] = {}
        self._blocked = 0
        self._consumers: list[list[int]] = [[] for _ in alternative.steps]
        self._wildcards: list[frozenset[str]] = []
        self._operands: list[frozenset[int]] = []
        for number, step in enumerate(alternative.steps):
            inner = [operand for _, each in step.arguments for operand, _ in pairs_of(each, each)]
            self._wildcards.append(frozenset(each.name for each in inner if isinstance(each, Wildcard)))
            self._operands.append(frozenset(each.step for each in inner if isinstance(each, PatternValue)))
            for operand in self._operands[-1]:
                self._consumers[operand].append(number)
        self.is_possible = self._narrow()
        self._twins = twins(alternative, self._wildcards, self._consumers) if self.is_possible else {}
        self._sources = [number for number, operands in enumerate(self._operands) if not operands]

    # -- candidates of each step ------------------------------------------------------------------------------

    def _narrow(self) -> bool:
        steps = self.alternative.steps
        for number, step in enumerate(steps):
            where = self.index.by_operation[step.target.name] if step.target.kind == "call" else self.index.calls
            self.candidates[number] = found = {}
            for position in where:
                orders = self._orders(step, self.index.calls[position])
                if orders:
                    found[position] = orders
            if not found:
                return False
        for number in range(len(steps) - 1, -1, -1):
            for consumer in self._consumers[number]:
                used = {
                    self.index.position[value]
                    for orders in self.candidates[consumer].values()
                    for pairs in orders
                    for operand, value in pairs
                    if isinstance(operand, PatternValue) and operand.step == number
                }
                kept = self.candidates[number]
                self.candidates[number] = {position: kept[position] for position in kept if position in used}
            if not self.candidates[number]:
                return False
        return True

    def _orders(self, step: PatternStep, found: IndexedCall) -> list[Pairs]:
        """Return the pairings of a step's operands with a call's."""
        self.tried += 1
        if step.target.kind != "call" and not has_target(step, found):
            return []
        return [
            tuple(pair for _, operand, value in order for pair in pairs_of(operand, value))
            for order in argument_orders(step, found)
            if all(could_be(operand, value, name, found, self.index, self.candidates) for name, operand, value in order)
        ]

    # -- exact search------------------------------------------------------------------------------------------

    def starts(self) -> Iterator[tuple[int, int]]:
        """Yield the possible first nodes of a match: position and step, in no order."""
        for number in self._sources:
            for position in self.candidates[number]:
                yield position, number

    def first_at(self, position: int, step: int, taken: set[int]) -> Embedding | None:
        """Return the first match that begins with ``step`` at ``position`` and has no node in ``taken``.

        Call it with growing positions and a growing ``taken``.
        """
        self._first, self._taken = position, taken
        self._placed: dict[int, int] = {}
        self._bound: dict[str, Any] = {}
        self._used: set[int] = set()
        if self._solve(((step, position),)):
            return tuple(self._placed[number] for number in range(len(self.alternative.steps))), dict(self._bound)
        return None

    def _solve(self, goals: tuple[tuple[int, int], ...]) -> bool:
        """Place ``goals`` and all other steps; undo it if that is impossible."""
        while goals and self._placed.get(goals[0][0]) == goals[0][1]:
            goals = goals[1:]
        if not goals:
            if len(self._placed) == len(self.alternative.steps):
                return True
            return self._solve_next()
        key = self._key(goals)
        if key in self._failed:
            return False
        blocked = self._blocked
        step, position = goals[0]
        for pairs in self._allowed(step, position):
            if self._place(step, position, pairs, goals[1:]):
                return True
        if blocked == self._blocked:
            self._failed.add(key)
        return False

    def _allowed(self, step: int, position: int) -> list[Pairs]:
        self.tried += 1
        if self.tried > MOST_STEPS:
            raise ArgumentError(
                f"pattern too ambiguous: the search in this graph exceeded {MOST_STEPS} steps",
                hint="use a smaller pattern, or constrain its arguments",
            )
        if step in self._placed or position < self._first or position in self._taken:
            return []
        if (position == self._first and self._placed) or not self._is_in_order(step, position):
            return []
        if position in self._used or self.index.calls[position].node in self._bound.values():
            self._blocked += 1
            return []
        return self.candidates[step].get(position, [])

    def _place(self, step: int, position: int, pairs: Pairs, goals: tuple[tuple[int, int], ...]) -> bool:
        bound: list[str] = []
        further: list[tuple[int, int]] = []
        self._placed[step] = position
        self._used.add(position)
        if self._unify(pairs, bound, further) and self._solve((*further, *goals)):
            return True
        del self._placed[step]
        self._used.discard(position)
        for name in bound:
            del self._bound[name]
        return False

    def _unify(self, pairs: Pairs, bound: list[str], further: list[tuple[int, int]]) -> bool:
        for operand, value in pairs:
            if isinstance(operand, PatternValue):
                position = self.index.position[value]
                if self._placed.get(operand.step, position) != position:
                    return False
                further.append((operand.step, position))
            elif operand.name in self._bound:
                if not _is_one_value(self._bound[operand.name], value):
                    return False
            else:
                if isinstance(value, fx.Node) and self.index.position[value] in self._used:
                    self._blocked += 1  # an input of a match is computed outside of it
                    return False
                self._bound[operand.name] = value
                bound.append(operand.name)
        return True

    def _solve_next(self) -> bool:
        """Continue with a step connected to the placed ones."""
        key = self._key(())
        if key in self._failed:
            return False
        blocked = self._blocked
        step, where = self._connected()
        for position in where:
            if self._solve(((step, position),)):
                return True
        if blocked == self._blocked:
            self._failed.add(key)
        return False

    def _is_in_order(self, step: int, position: int) -> bool:
        """Return whether twins of this step are placed in their order."""
        return all(
            (twin < step) == (self._placed[twin] < position)
            for twin in self._twins.get(step, ())
            if twin in self._placed
        )

    def _connected(self) -> tuple[int, list[int]]:
        """Return the step with the fewest remaining places, and these."""
        best: tuple[int, list[int]] | None = None
        for step in range(len(self._operands)):
            if step in self._placed:
                continue
            for value in self._known_operands(step):
                where = self._near_to(value, step)
                if best is None or len(where) < len(best[1]):
                    best = step, where
        if best is not None:
            return best
        left = [step for step in range(len(self._operands)) if step not in self._placed]
        step = min(left, key=lambda each: len(self.candidates[each]))
        return step, sorted(self.candidates[step])

    def _known_operands(self, step: int) -> Iterator[Any]:
        for operand in self._operands[step]:
            if operand in self._placed:
                yield self.index.calls[self._placed[operand]].node
        for name in self._wildcards[step]:
            value = self._bound.get(name)
            if isinstance(value, fx.Node | Attribute):
                yield value

    def _near_to(self, value: Any, step: int) -> list[int]:
        found = self._near.get((value, step))
        if found is None:
            candidates = self.candidates[step]
            found = [position for position in self.index.users.get(value, ()) if position in candidates]
            self._near[value, step] = found
        return found

    def _key(self, goals: tuple[tuple[int, int], ...]) -> Any:
        """Return everything that decides whether the remaining steps can be placed."""
        placed, bound = self._placed, self._bound
        steps_placed = frozenset(placed)
        needed = self._needed.get(steps_placed)
        if needed is None:
            left = [step for step in range(len(self._operands)) if step not in placed]
            names = sorted({name for step in left for name in self._wildcards[step]})
            steps = sorted({operand for step in left for operand in self._operands[step]} & steps_placed)
            needed = self._needed[steps_placed] = (len(self._needed), names, steps)
        number, names, steps = needed
        return number, goals, tuple([bound.get(name) for name in names]), tuple([placed[step] for step in steps])


def positions_of(alternative: Alternative, steps: tuple[int, ...], index: Indexed) -> list[int]:
    """Return the positions of all nodes of a match; for an inlined module, of its entire call.

    Args:
        alternative: that matches.
        steps: the position of each step.
        index: of the graph.
    """
    found = set(steps)
    for step, position in zip(alternative.steps, steps, strict=True):
        call = index.calls[position]
        if call.inside and is_by_module(step, call):
            found.update(call.inside)
    return sorted(found)


def is_by_module(step: PatternStep, found: IndexedCall) -> bool:
    """Return whether a step matches a call by its module, not by its operation."""
    if step.target.kind == "module":
        return True
    return step.target.kind in ("glob", "regex") and not has_target(step, replace(found, class_name=None))


def _is_one_value(one: Any, other: Any) -> bool:
    if isinstance(one, fx.Node) or isinstance(other, fx.Node):
        return one is other
    return type(one) is type(other) and bool(one == other)


# All places of a pattern in one graph.


def embeddings(alternatives: Sequence[Alternative], index: Indexed) -> tuple[list[tuple[int, Embedding]], int]:
    """Return the places of a pattern's alternatives in a graph; no two share a node.

    The first begins at the earliest possible node, and is of the earliest alternative that matches there. The next
    begins at the earliest node that still leaves one, and so on.

    Returns:
        the number of the alternative and the place, for each; the number of placements tried, as the cost.
    """
    matchers = {
        number: AlternativeMatcher(alternative, index)
        for number, alternative in enumerate(alternatives)
        if _may_be_there(alternative, index)
    }
    starts: dict[int, list[tuple[int, int]]] = {}
    for number, matcher in matchers.items():
        if matcher.is_possible:
            for position, step in matcher.starts():
                starts.setdefault(position, []).append((number, step))
    taken: set[int] = set()
    found = []
    for position in sorted(starts):
        if position in taken:
            continue
        for number, step in sorted(starts[position]):
            embedding = matchers[number].first_at(position, step, taken)
            if embedding is not None and taken.isdisjoint(
                covered := positions_of(alternatives[number], embedding[0], index)
            ):
                taken.update(covered)
                found.append((number, embedding))
                break
    return found, sum(matcher.tried for matcher in matchers.values())


def _may_be_there(alternative: Alternative, index: Indexed) -> bool:
    """Return whether the graph has each operation of an alternative: most alternatives end here."""
    return all(step.target.kind != "call" or step.target.name in index.by_operation for step in alternative.steps)
