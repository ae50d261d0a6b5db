"""What an attribute has to be at a call for a graph to be valid there."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slapo_core.graph.structure import is_plain

__all__ = ["ABSENT", "Equal", "Parts", "Same", "expected_of", "is_held"]


class _Absent:
    def __repr__(self) -> str:
        return "(no such attribute)"


ABSENT = _Absent()
"""In place of the value of an attribute that is not there."""


@dataclass(frozen=True)
class Same:
    """This very object: a function, a member of an enumeration, an element that is a tensor or a module."""

    value: Any

    def __repr__(self) -> str:
        return str(getattr(self.value, "__qualname__", None) or f"this {type(self.value).__name__}")


@dataclass(frozen=True)
class Equal:
    """An object that compares equal to this copy of it."""

    value: Any

    def __repr__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True)
class Parts:
    """A container of this type, whose elements are as expected."""

    kind: type
    keys: tuple[Any, ...]
    items: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"this {self.kind.__name__} of {len(self.items)}"


def expected_of(value: Any) -> Any:
    """What is kept of a value that was read: plain values themselves, else what identifies them."""
    if value is ABSENT:
        return ABSENT
    if is_plain(value):
        return copy.deepcopy(value)
    if isinstance(value, Mapping):
        return Parts(type(value), tuple(value), tuple(map(expected_of, value.values())))
    if isinstance(value, list | tuple):
        return Parts(type(value), (), tuple(map(expected_of, value)))
    if isinstance(value, types.SimpleNamespace):
        return Parts(type(value), tuple(vars(value)), tuple(map(expected_of, vars(value).values())))
    if isinstance(value, types.MethodType):
        return Same(value.__func__)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return Equal(copy.copy(value))
    return Same(value)


def is_held(expected: Any, found: Any) -> bool:
    """Whether ``found`` is what :func:`expected_of` kept."""
    if found is expected:
        return True
    if type(expected) is Same:
        return (found.__func__ if isinstance(found, types.MethodType) else found) is expected.value
    if type(expected) is Equal:
        return type(found) is type(expected.value) and bool(found == expected.value)
    if type(expected) is Parts:
        if type(found) is not expected.kind:
            return False
        if isinstance(found, types.SimpleNamespace):
            found = vars(found)
        if len(found) != len(expected.items):
            return False
        if isinstance(found, Mapping):
            return tuple(found) == expected.keys and all(map(is_held, expected.items, found.values()))
        return all(map(is_held, expected.items, found))
    return type(found) is type(expected) and bool(found == expected)
