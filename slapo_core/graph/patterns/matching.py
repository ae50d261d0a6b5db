"""Exact matching of one form in one graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from slapo_core.errors import ArgumentError
from slapo_core.graph.patterns.aligning import aligned, has_target
from slapo_core.graph.patterns.calls import Attribute
from slapo_core.graph.patterns.comparing import could_be, pairs_of
from slapo_core.graph.patterns.data import Form, Result, Step, Wildcard
from slapo_core.graph.patterns.index import Indexed, IndexedCall
from slapo_core.graph.patterns.twins import twins

__all__ = ["Embedding", "FormMatcher"]

MOST_STEPS = 300_000
Pairs = tuple[tuple[Any, Any], ...]


class Embedding:
    """One way in which a form stands in a graph.

    Args:
        positions: of graph nodes, one for each step.
        bindings: what the wildcards are.
    """

    def __init__(self, positions: tuple[int, ...], bindings: dict[str, Any]) -> None:
        self.positions, self.bindings = positions, bindings


class FormMatcher:
    """Finds where one form stands in one graph.

    First, for each step, where it may stand if what its wildcards have in common did not matter (``candidates``); then
    exactly, and only there. A partial placement that failed is not tried again.

    Args:
        form: of a pattern; the graph has each of its operations.
        index: of the graph.
    """

    def __init__(self, form: Form, index: Indexed) -> None:
        self.form, self.index = form, index
        self.tried = 0
        self.candidates: dict[int, dict[int, list[Pairs]]] = {}
        self._failed: set[Any] = set()
        self._needed: dict[frozenset[int], tuple[int, list[str], list[int]]] = {}
        self._near: dict[tuple[Any, int], list[int]] = {}
        self._blocked = 0
        self._consumers: list[list[int]] = [[] for _ in form.steps]
        self._wildcards: list[frozenset[str]] = []
        self._operands: list[frozenset[int]] = []
        for number, step in enumerate(form.steps):
            inner = [operand for _, each in step.arguments for operand, _ in pairs_of(each, each)]
            self._wildcards.append(frozenset(each.name for each in inner if isinstance(each, Wildcard)))
            self._operands.append(frozenset(each.step for each in inner if isinstance(each, Result)))
            for operand in self._operands[-1]:
                self._consumers[operand].append(number)
        self.is_possible = self._narrow()
        self._twins = twins(form, self._wildcards, self._consumers) if self.is_possible else {}
        self._sources = [number for number, operands in enumerate(self._operands) if not operands]

    # -- where each step may stand ----------------------------------------------------------------------------

    def _narrow(self) -> bool:
        steps = self.form.steps
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
                    if isinstance(operand, Result) and operand.step == number
                }
                kept = self.candidates[number]
                self.candidates[number] = {position: kept[position] for position in kept if position in used}
            if not self.candidates[number]:
                return False
        return True

    def _orders(self, step: Step, found: IndexedCall) -> list[Pairs]:
        """The ways in which the operands of ``step`` may stand for those of ``found``."""
        self.tried += 1
        if step.target.kind != "call" and not has_target(step, found):
            return []
        rows = aligned(step, found)
        if rows is None:
            return []
        orders = [rows]
        if step.is_commutative and found.call is not None and found.call.is_commutative:
            (first, left, x), (second, right, y) = rows
            orders.append([(first, left, y), (second, right, x)])
        return [
            tuple(pair for _, operand, value in order for pair in pairs_of(operand, value))
            for order in orders
            if all(could_be(operand, value, name, found, self.index, self.candidates) for name, operand, value in order)
        ]

    # -- exactly ----------------------------------------------------------------------------------------------

    def starts(self) -> Iterator[tuple[int, int]]:
        """Where a match may begin: position, and the step that stands there; not in any order."""
        for number in self._sources:
            for position in self.candidates[number]:
                yield position, number

    def first_at(self, position: int, step: int, taken: set[int]) -> Embedding | None:
        """The first match whose earliest node is ``step`` at ``position``, and that has no node in ``taken``.

        To be asked with growing positions and a growing ``taken``.
        """
        self._first, self._taken = position, taken
        self._placed: dict[int, int] = {}
        self._bound: dict[str, Any] = {}
        self._used: set[int] = set()
        if self._solve(((step, position),)):
            return Embedding(tuple(self._placed[number] for number in range(len(self.form.steps))), dict(self._bound))
        return None

    def _solve(self, goals: tuple[tuple[int, int], ...]) -> bool:
        """Place ``goals`` and every step that is left; what it did stays only if that is possible."""
        while goals and self._placed.get(goals[0][0]) == goals[0][1]:
            goals = goals[1:]
        if not goals:
            if len(self._placed) == len(self.form.steps):
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
                f"the pattern can stand in too many ways in this graph (more than {MOST_STEPS} tried)",
                hint="make it smaller, or say more of what its arguments are",
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
            if isinstance(operand, Result):
                position = self.index.position[value]
                if self._placed.get(operand.step, position) != position:
                    return False
                further.append((operand.step, position))
            elif operand.name in self._bound:
                if not _is_same(self._bound[operand.name], value):
                    return False
            else:
                if isinstance(value, fx.Node) and self.index.position[value] in self._used:
                    self._blocked += 1  # what goes into a match is computed outside of it
                    return False
                self._bound[operand.name] = value
                bound.append(operand.name)
        return True

    def _solve_next(self) -> bool:
        """Go on with a step that is connected to what is placed."""
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
        """Of steps that could change places, the earlier one stands earlier."""
        return all(
            (twin < step) == (self._placed[twin] < position)
            for twin in self._twins.get(step, ())
            if twin in self._placed
        )

    def _connected(self) -> tuple[int, list[int]]:
        """The step with the fewest places left, and these."""
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
        """All that the success of what is left depends on."""
        placed, bound = self._placed, self._bound
        whole = frozenset(placed)
        needed = self._needed.get(whole)
        if needed is None:
            left = [step for step in range(len(self._operands)) if step not in placed]
            names = sorted({name for step in left for name in self._wildcards[step]})
            steps = sorted({operand for step in left for operand in self._operands[step]} & whole)
            needed = self._needed[whole] = (len(self._needed), names, steps)
        number, names, steps = needed
        return number, goals, tuple([bound.get(name) for name in names]), tuple([placed[step] for step in steps])


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, fx.Node) or isinstance(other, fx.Node):
        return one is other
    return type(one) is type(other) and bool(one == other)
