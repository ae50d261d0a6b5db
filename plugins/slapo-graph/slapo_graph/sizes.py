"""Symbolic sizes: numbers that record the arithmetic on them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import fx

    from slapo_graph.tracing.writer import GraphWriter


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
    "ceil": math.ceil,
    "float_pow": operator.pow,
    "float_truediv": operator.truediv,
    "floor": math.floor,
    "int_floordiv": operator.floordiv,
    "int_truediv": operator.truediv,
    "is_integer": float.is_integer,
    "pow_by_natural": operator.pow,
    "round": round,
    "sym_and": operator.and_,
    "sym_float": float,
    "sym_int": int,
    "sym_max": max,
    "sym_min": min,
    "sym_not": operator.not_,
    "sym_or": operator.or_,
    "trunc": math.trunc,
}
"""What SymInt, SymFloat and SymBool ask their node to compute, where Python's ``operator`` has another name."""


def _function_of(name: str) -> Callable[..., Any] | None:
    return None if name.startswith("_") else _FUNCTIONS.get(name) or getattr(operator, name, None)


_ANSWERS = ("bool_", "expect_true", "guard_bool", "guard_float", "guard_int", "guard_or_false", "guard_or_true")
_ANSWERS_ON_SIZES = ("guard_size_oblivious", "int_", "statically_known_true")


class SizeNode:
    """Hold the value and graph node of a SymInt, SymFloat or SymBool.

    Arithmetic adds nodes to the graph; a use of the plain number (a branch, a loop) adds a guard.

    Args:
        recording: the one in progress; None after its end.
        hint: the value in this recording.
        node: of the graph, giving the value at each call; None for a constant.
    """

    constant = None

    def __init__(self, recording: GraphWriter | None, hint: Any, node: fx.Node | None) -> None:
        self.recording, self.hint, self.node = recording, hint, node
        if node is not None and recording is not None and recording.notes is not None:
            recording.notes.values[node] = hint

    # What torch asks ------------------------------------------------------------------------------------------

    def is_int(self) -> bool:
        return type(self.hint) is int

    def is_float(self) -> bool:
        return type(self.hint) is float

    def is_bool(self) -> bool:
        return type(self.hint) is bool

    def is_constant(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return True

    def is_nested_int(self) -> bool:
        return False

    def nested_int(self) -> None:
        return None

    def has_hint(self) -> bool:
        return True

    def maybe_as_int(self) -> None:
        return None

    maybe_as_float = maybe_as_bool = maybe_as_int

    def wrap_int(self, number: Any) -> SizeNode:
        return SizeNode(self.recording, number, None)

    wrap_float = wrap_bool = wrap_int

    def str(self) -> str:
        return str(self.hint)

    __str__ = __repr__ = _graph_repr = str

    def __getattr__(self, name: str) -> Any:  # type: ignore[valid-type]
        if name in _ANSWERS or name in _ANSWERS_ON_SIZES:
            return self._decide
        function = _function_of(name)
        if function is None:
            raise AttributeError(name)
        return lambda *others: self._compute(function, *others)

    def _decide(self, *_: Any) -> Any:
        if self.recording is not None:
            self.recording.guard(self.node, self.hint)
        return self.hint

    def _compute(self, function: Callable[..., Any], *others: Any) -> SizeNode:
        operands = (self, *others)
        hint = function(*(operand.hint if isinstance(operand, SizeNode) else operand for operand in operands))
        if self.recording is None:
            return SizeNode(None, hint, None)
        node = self.recording.size(
            function,
            tuple(
                (operand.hint if operand.node is None else operand.node) if isinstance(operand, SizeNode) else operand
                for operand in operands
            ),
        )
        return SizeNode(self.recording, hint, node)


class _Int(torch.SymInt):
    """A symbolic number whose class reads as ``int``."""

    __class__ = property(lambda self: int)  # type: ignore[assignment]


class _Float(torch.SymFloat):
    """As :class:`_Int`, for ``float``."""

    __class__ = property(lambda self: float)  # type: ignore[assignment]


def _own(number: Any) -> Any:
    """Convert a result of torch's arithmetic to a symbolic number."""
    if isinstance(number, tuple):
        return tuple(_own(part) for part in number)
    if type(number) is torch.SymInt:
        return _Int(number.node)
    return _Float(number.node) if type(number) is torch.SymFloat else number


def _of_torch(number: Any) -> Any:
    """Convert a symbolic number to torch's own, where an ``int`` is a constant."""
    if type(number) is _Int:
        return torch.SymInt(number.node)
    return torch.SymFloat(number.node) if type(number) is _Float else number


def _computed(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute(self: Any, *others: Any) -> Any:
        return _own(original(_of_torch(self), *map(_of_torch, others)))

    return compute


def _decided(function: Callable[..., Any]) -> Callable[..., Any]:
    """Convert to a plain value, with a guard."""
    return lambda self, *arguments: function(self.node._decide(), *arguments)


_OPERATIONS = (
    "abs", "add", "and", "ceil", "eq", "floor", "floordiv", "ge", "gt", "le", "lshift", "lt", "mod", "mul", "ne", "neg",
    "or", "pos", "pow", "radd", "rand", "rfloordiv", "rlshift", "rmod", "rmul", "ror", "round", "rpow", "rrshift",
    "rshift", "rsub", "rtruediv", "rxor", "sub", "truediv", "trunc", "xor", "sym_float", "sym_int", "sym_max",
    "sym_min", "sym_ite",
)  # fmt: skip
for _class in (_Int, _Float):
    for _name in [f"__{name}__" for name in _OPERATIONS]:
        if hasattr(_class.__base__, _name):
            setattr(_class, _name, _computed(getattr(_class.__base__, _name)))
    for _function in (hash, str, format, divmod):
        setattr(_class, f"__{_function.__name__}__", _decided(_function))


def symbolic(recording: GraphWriter, hint: Any, node: fx.Node) -> Any:
    """Return ``hint`` as a number that records the arithmetic on it."""
    return _number(SizeNode(recording, hint, node))


def constant(hint: Any) -> Any:
    """Return a number of :func:`symbolic` that no longer records."""
    return _number(SizeNode(None, hint, None))


def _number(made: SizeNode) -> Any:
    if made.is_int():
        return _Int(made)
    return _Float(made) if made.is_float() else torch.SymBool(made)


def is_symbolic(value: Any) -> bool:
    """Return whether ``value`` is a number of :func:`symbolic`."""
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) and isinstance(value.node, SizeNode)


def hint_of(value: Any) -> Any:
    """Return the plain number."""
    return value.node.hint
