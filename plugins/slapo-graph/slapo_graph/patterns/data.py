"""Patterns and calls as plain data: frozen, comparable, hashable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# A call in one normal form, in which all ways to write one operation are the same.


@dataclass(frozen=True)
class Attribute:
    """A parameter, buffer or tensor of the traced module that no node of the graph reads.

    Args:
        path: relative to the traced module, e.g. ``"dense.weight"``.
    """

    path: str

    def __str__(self) -> str:
        return f"self.{self.path}"


@dataclass(frozen=True)
class Slice:
    """``[start:stop:step]``, whose parts may be values."""

    start: Any
    stop: Any
    step: Any


@dataclass(frozen=True)
class Items:
    """A dictionary among the arguments of a call."""

    keys: tuple[Any, ...]
    values: tuple[Any, ...]


@dataclass(frozen=True)
class CanonicalCall:
    """The computation of a node.

    Args:
        operation: the canonical name, e.g. ``"softmax"``, or its substitute.
        arguments: by parameter name; what equals the default is left out. Lists are tuples.
        is_commutative: whether ``input`` and ``other`` may change places.
        names: what a glob or regular expression over call targets may match.
    """

    operation: str
    arguments: dict[str, Any]
    is_commutative: bool = False
    names: tuple[str, ...] = ()


def parts(value: Any) -> tuple[Any, ...] | None:
    """Return the operands in a container; None if it is not a container."""
    if isinstance(value, tuple):
        return value
    if isinstance(value, Slice):
        return (value.start, value.stop, value.step)
    return value.values if isinstance(value, Items) else None


# A pattern as plain data: frozen, comparable, hashable.


@dataclass(frozen=True)
class Wildcard:
    """Any value, the same at all its uses in one alternative.

    Args:
        name: of the capture; one that starts with ``_`` is not captured.
        kind: ``"value"``: of the graph, a parameter or a buffer; ``"constant"``; ``"parameter"``: no node.
        shape: of a parameter, if it is known.
    """

    name: str
    kind: str = "value"
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class PatternValue:
    """The result of a step of the alternative.

    Args:
        step: its position in the alternative.
    """

    step: int


@dataclass(frozen=True)
class Constant:
    """A number, text, dtype, ...; 1, 1.0 and True are different ones."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and _key(self.value) == _key(other.value)

    def __hash__(self) -> int:
        return hash(_key(self.value))


def _key(value: Any) -> tuple[type, str]:
    return (type(value), repr(value))


@dataclass(frozen=True)
class PatternTarget:
    """Which calls a step matches.

    Args:
        kind: ``"call"``: of the operation ``name``; ``"any"``: any; ``"module"``: of a module whose path or class fits
            the glob ``name``; ``"glob"`` and ``"regex"``: whose target fits ``name``; ``"where"``: for which
            ``predicate`` holds.
        name: as above.
        flags: of a regular expression.
        predicate: takes a :class:`torch.fx.Node`.
    """

    kind: str
    name: str = ""
    flags: int = 0
    predicate: Callable[..., Any] | None = None


@dataclass(frozen=True)
class PatternStep:
    """One call of an alternative.

    Args:
        target: the calls that it matches.
        arguments: by canonical name; wildcards, results, constants, and containers of such.
        is_commutative: whether ``input`` and ``other`` may change places.
        location: line of the pattern, for messages.
    """

    target: PatternTarget
    arguments: tuple[tuple[str, Any], ...] = ()
    is_commutative: bool = False
    location: str = field(default="", compare=False)


@dataclass(frozen=True)
class Alternative:
    """One way to write a pattern in a graph, without choices.

    Args:
        steps: operands before those who use them.
        outputs: results among what the pattern's function returned.
        inputs: names of the wildcards that are inputs of a match, in the order of the pattern's arguments.
        captures: name and operand.
    """

    steps: tuple[PatternStep, ...]
    outputs: tuple[int, ...]
    inputs: tuple[str, ...]
    captures: tuple[tuple[str, Any], ...]
