"""Steps of a form that could change places: searching for them in one order is enough."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from slapo_core.graph.patterns.calls import Items, Slice
from slapo_core.graph.patterns.comparing import pairs_of
from slapo_core.graph.patterns.data import Form, Step, Wildcard

__all__ = ["twins"]


def twins(form: Form, wildcards: list[frozenset[str]], consumers: list[list[int]]) -> dict[int, list[int]]:
    """For each step the others that it could change places with: nothing uses them, and they differ in wildcards only
    that no other step has."""
    count = Counter(name for names in wildcards for name in names)
    groups: dict[Any, list[int]] = {}
    for number, step in enumerate(form.steps):
        if consumers[number]:
            continue
        own = {name: f"_own_{index}" for index, name in enumerate(_met(step)) if count[name] == 1}
        arguments = tuple((name, _renamed(operand, own)) for name, operand in step.arguments)
        groups.setdefault((step.target, arguments, step.is_commutative), []).append(number)
    return {number: [each for each in group if each != number] for group in groups.values() for number in group}


def _met(step: Step) -> list[str]:
    """The names of a step's wildcards in the order of its arguments."""
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
