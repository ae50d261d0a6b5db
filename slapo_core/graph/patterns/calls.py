"""A call in one normal form, in which all ways to write one operation are the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Attribute", "Call", "Items", "Slice", "parts"]


@dataclass(frozen=True)
class Attribute:
    """A parameter, buffer or tensor of the traced module, read where no node of the graph reads it.

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
class Call:
    """What a node computes.

    Args:
        operation: the canonical name, e.g. ``"softmax"``, or what stands for it.
        arguments: by parameter name; what equals the default is left out. Lists are tuples.
        is_commutative: whether ``input`` and ``other`` may change places.
        names: what a glob or regular expression over call targets may match.
    """

    operation: str
    arguments: dict[str, Any]
    is_commutative: bool = False
    names: tuple[str, ...] = ()


def parts(value: Any) -> tuple[Any, ...] | None:
    """The operands inside of a container; None if it is none."""
    if isinstance(value, tuple):
        return value
    if isinstance(value, Slice):
        return (value.start, value.stop, value.step)
    return value.values if isinstance(value, Items) else None
