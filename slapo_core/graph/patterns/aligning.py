"""A step of a pattern beside a call of a graph: the target, and the arguments one by one."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Any

from slapo_core.graph.patterns.comparing import MISSING
from slapo_core.graph.patterns.data import Step
from slapo_core.graph.patterns.index import IndexedCall
from slapo_core.graph.patterns.schemas import defaults_of

__all__ = ["aligned", "has_target"]


def has_target(step: Step, found: IndexedCall) -> bool:
    """Whether ``found`` calls what ``step`` calls."""
    target = step.target
    if target.kind == "call":
        return found.call is not None and found.call.operation == target.name
    if target.kind == "any":
        return True
    if target.kind == "module":
        if found.class_name is None:
            return False
        return fnmatchcase(found.path, target.name) or fnmatchcase(found.class_name, target.name)
    if target.kind == "glob":
        return any(fnmatchcase(name, target.name) for name in found.names)
    if target.kind == "regex":
        expression = re.compile(target.name, target.flags)
        return any(expression.search(name) for name in found.names)
    assert target.predicate is not None
    return bool(target.predicate(found.node))


def aligned(step: Step, found: IndexedCall) -> list[tuple[str, Any, Any]] | None:
    """The arguments of both, side by side: name, operand, value; None if they cannot be."""
    kind = step.target.kind
    if kind == "call":
        assert found.call is not None
        return _by_name(step, found.call.operation, found.call.arguments)
    if kind == "any":
        if len(step.arguments) != len(found.values):
            return None
        return [(name, operand, value) for (name, operand), value in zip(step.arguments, found.values, strict=True)]
    if kind == "module":
        names = found.parameters
        ours = {
            names[int(name)] if name.isdigit() and int(name) < len(names) else name: operand
            for name, operand in step.arguments
        }
        given = dict(found.given)
        rows = []
        for name, operand in ours.items():
            if name not in given and (name not in names or getattr(operand, "value", MISSING) is not None):
                return None
            rows.append((name, operand, given.pop(name, None)))
        return None if given else rows
    return []


def _by_name(step: Step, operation: str, given: dict[str, Any]) -> list[tuple[str, Any, Any]] | None:
    if len(step.arguments) == len(given):
        rows = [(name, operand, given.get(name, MISSING)) for name, operand in step.arguments]
        if all(row[2] is not MISSING for row in rows):
            return rows
    defaults = defaults_of(operation)
    ours = dict(step.arguments)
    rows = []
    for name in (*ours, *(name for name in given if name not in ours)):
        if name not in ours:
            return None  # the pattern has the default, the graph has not
        value = given.get(name, defaults.get(name, MISSING))
        if value is MISSING:
            return None
        rows.append((name, ours[name], tuple(value) if isinstance(value, list) else value))
    return rows
