"""Whether an operand of a pattern may stand for an operand of a graph, whatever the wildcards are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx

from slapo_core.graph.patterns.calls import Attribute, Items, parts
from slapo_core.graph.patterns.data import Constant, Result, Wildcard
from slapo_core.graph.patterns.index import Indexed, IndexedCall, values_in
from slapo_core.graph.patterns.operations import same_on_every_axis

__all__ = ["MISSING", "could_be", "is_constant", "pairs_of"]


class MISSING:
    """In place of an argument that has no default and was left out."""


_AXES = ("dim", "dim0", "dim1", "dims", "start_dim", "end_dim")
_ONE_AXIS_MORE = ("diag_embed", "unsqueeze", "unsqueeze_")
"""Operations whose axes are those of the result."""
_REPEATED = ("dilation", "kernel_size", "output_padding", "output_size", "padding", "stride")


def is_constant(value: Any) -> bool:
    """Whether no value of the graph is in it."""
    return value is not MISSING and not any(True for _ in values_in((value,)))


def could_be(
    operand: Any, value: Any, name: str, found: IndexedCall, index: Indexed, candidates: Mapping[int, Any]
) -> bool:
    """Whether ``operand`` of a step may stand for ``value``.

    Args:
        operand: of the pattern.
        value: of the graph.
        name: of the parameter.
        found: the call that has the value.
        index: of the graph.
        candidates: positions where each earlier step may stand.
    """
    if isinstance(operand, Wildcard):
        if operand.kind == "constant":
            return is_constant(value)
        if isinstance(value, Attribute):
            return operand.shape is None or operand.shape == tuple(getattr(index.tensor(value), "shape", ()))
        return isinstance(value, fx.Node) and operand.kind == "value"
    if isinstance(operand, Result):
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
    """The wildcards and results in ``operand``, each with what it stands for."""
    if isinstance(operand, Wildcard | Result):
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
    """Whether the call takes one length out of the shape of a tensor."""
    call = found.call
    whole = call.arguments.get("input") if call is not None and call.operation == "getitem" else None
    return isinstance(whole, fx.Node) and whole.target is getattr and whole.args[1] == "shape"


def _is_floating(found: IndexedCall) -> bool:
    """Whether all tensors that the call uses are known to be of floating point, so that 2 and 2.0 compute the same."""
    examples = [value.meta.get("example") if isinstance(value, fx.Node) else None for value in found.values]
    return bool(examples) and all(example is not None and example[1].is_floating_point for example in examples)
