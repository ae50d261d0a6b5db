"""Single operands and calls of a pattern and of a graph, compared without regard to shared wildcards."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import fx

from slapo_graph.arguments import MISSING
from slapo_graph.patterns.data import Attribute, Constant, Items, PatternStep, PatternValue, Wildcard, parts
from slapo_graph.patterns.index import Indexed, IndexedCall, values_in
from slapo_graph.patterns.operations import same_on_every_axis
from slapo_graph.patterns.schemas import defaults_of

_AXES = ("dim", "dim0", "dim1", "dims", "start_dim", "end_dim")
_ONE_AXIS_MORE = ("diag_embed", "unsqueeze", "unsqueeze_")
"""Operations whose axes count in the result."""
_REPEATED = ("dilation", "kernel_size", "output_padding", "output_size", "padding", "stride")


def is_constant(value: Any) -> bool:
    """Return whether a value holds no value of the graph."""
    return value is not MISSING and not any(True for _ in values_in((value,)))


def could_be(
    operand: Any, value: Any, name: str, found: IndexedCall, index: Indexed, candidates: Mapping[int, Any]
) -> bool:
    """Return whether an operand of a pattern may match a value, whatever the wildcards are.

    Args:
        operand: of the pattern.
        value: of the graph.
        name: of the parameter.
        found: the call that has the value.
        index: of the graph.
        candidates: positions of each earlier step.
    """
    if isinstance(operand, Wildcard):
        if operand.kind == "constant":
            return is_constant(value)
        if isinstance(value, Attribute):
            return operand.shape is None or operand.shape == tuple(getattr(index.tensor(value), "shape", ()))
        return isinstance(value, fx.Node) and operand.kind == "value"
    if isinstance(operand, PatternValue):
        return isinstance(value, fx.Node) and index.position[value] in candidates[operand.step]
    if isinstance(operand, Constant):
        return is_constant(value) and _equal(operand.value, value, name, found)
    if isinstance(operand, tuple) != isinstance(value, tuple):
        return is_constant(value) and _equal(operand, value, name, found)
    if type(operand) is not type(value):
        return False
    if isinstance(operand, Items) and operand.keys != value.keys:
        return False
    ours, theirs = parts(operand) or (), parts(value) or ()
    if len(ours) != len(theirs):
        return False
    return all(could_be(ours[i], theirs[i], name, found, index, candidates) for i in range(len(ours)))


def pairs_of(operand: Any, value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the wildcards and results in ``operand``, each with its counterpart in ``value``."""
    if isinstance(operand, Wildcard | PatternValue):
        yield operand, value
    elif not isinstance(operand, Constant):
        ours, theirs = parts(operand) or (), parts(value) or ()
        for one, other in zip(ours, theirs, strict=False):
            yield from pairs_of(one, other)


def _equal(expected: Any, value: Any, name: str, found: IndexedCall) -> bool:
    if type(expected) is type(value) and repr(expected) == repr(value):
        return True
    if isinstance(expected, tuple) != isinstance(value, tuple):
        if isinstance(expected, tuple):
            expected = tuple(part.value if isinstance(part, Constant) else part for part in expected)
        many, one = (expected, value) if isinstance(expected, tuple) else (value, expected)
        if name == "dim" and len(many) == 1:
            return _equal(many[0], one, name, found)
        return name in _REPEATED and same_on_every_axis(many, one)
    if (name in _AXES or _is_shape(found)) and type(expected) is int and type(value) is int:
        rank = _rank(found)
        return rank is not None and rank > 0 and (expected - value) % rank == 0 and -rank <= expected < rank
    if type(expected) in (int, float) and type(value) in (int, float) and expected == value:
        return _is_floating(found)
    return False


def _rank(found: IndexedCall) -> int | None:
    given = found.call.arguments if found.call is not None else {}
    first = given.get("input")
    if _is_shape(found) and isinstance(first, fx.Node):
        first = first.args[0]
    if "tensors" in given and found.call is not None and found.call.operation == "cat":
        first = next(iter(parts(given["tensors"]) or (None,)))
    example = first.meta.get("example") if isinstance(first, fx.Node) else None
    if example is None:
        return None
    return len(example[0]) + (found.call is not None and found.call.operation in _ONE_AXIS_MORE)


def _is_shape(found: IndexedCall) -> bool:
    """Return whether a call reads one size of a tensor's shape."""
    call = found.call
    shape = call.arguments.get("input") if call is not None and call.operation == "getitem" else None
    return isinstance(shape, fx.Node) and shape.target is getattr and shape.args[1] == "shape"


def _is_floating(found: IndexedCall) -> bool:
    """Return whether a call's tensors are known to be floating-point, so that 2 and 2.0 compute the same."""
    examples = [value.meta.get("example") if isinstance(value, fx.Node) else None for value in found.values]
    return bool(examples) and all(example is not None and example[1].is_floating_point for example in examples)


# Steps and calls: target and arguments.


def has_target(step: PatternStep, found: IndexedCall) -> bool:
    """Return whether a call has the target of a step."""
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


Row = tuple[str, Any, Any]
"""An argument: its name, the operand of the pattern, the value in the graph."""


def argument_orders(step: PatternStep, found: IndexedCall) -> list[list[Row]]:
    """Return the pairings of a step's and a call's arguments: two if they commute, none if they differ."""
    if step.target.kind == "call" and found.call is not None:
        rows = _by_name(step, found.call.operation, found.call.arguments)
    else:
        rows = _aligned(step, found)
    if rows is None:
        return []
    if not (step.is_commutative and found.call is not None and found.call.is_commutative):
        return [rows]
    (first, left, x), (second, right, y) = rows
    return [rows, [(first, left, y), (second, right, x)]]


def _aligned(step: PatternStep, found: IndexedCall) -> list[Row] | None:
    kind = step.target.kind
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


def _by_name(step: PatternStep, operation: str, given: dict[str, Any]) -> list[Row] | None:
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
