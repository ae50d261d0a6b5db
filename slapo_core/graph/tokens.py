"""What identifies the value of an attribute: equal tokens, equal meaning for the code that read it."""

from __future__ import annotations

import dataclasses
import enum
import functools
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

__all__ = ["ABSENT", "Identity", "Parts", "describe", "is_transparent", "real_type", "same", "token"]

_SCALARS = (bool, int, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout)
_BY_IDENTITY = (FunctionType, BuiltinFunctionType, ModuleType, type, enum.Enum)
_MANY = 1000
"""Containers of more parts are told apart by their length only: they are data, and not settings."""


class ABSENT:
    """The token of an attribute that is not there."""


class Parts:
    """The token of a container in which certain tensors must be the very same.

    Args:
        container: a list, tuple or dictionary.
    """

    def __init__(self, container: Any) -> None:
        self.parts = [(key, part) for key, part in _items(container) if isinstance(part, torch.Tensor)]
        self.rest = token([(key, part) for key, part in _items(container) if not isinstance(part, torch.Tensor)])

    def hold(self, found: Any) -> bool:
        """Whether ``found`` has the same tensors at the same places, and beside them what was there."""
        now = Parts(found) if isinstance(found, list | tuple | dict) else None
        if now is None or len(now.parts) != len(self.parts) or now.rest != self.rest:
            return False
        return all(
            one == key and part is tensor for (one, part), (key, tensor) in zip(now.parts, self.parts, strict=True)
        )

    def __repr__(self) -> str:
        return f"these {len(self.parts)} tensors"


def _items(container: Any) -> Any:
    return container.items() if isinstance(container, dict) else enumerate(container)


class Identity:
    """The token of an object that must be the very same.

    Args:
        value: the object.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"this {type(self.value).__name__}"


def token(value: Any) -> Any:
    """Of settings their values, in containers too; of functions and classes themselves; of other objects their class.

    Copies of a model have equal tokens: tensors count by shape and dtype, modules by their class.
    """
    cls = real_type(value)
    if cls in _SCALARS:
        return value
    if cls is float:
        return value if value == value else "nan"
    if cls in (tuple, list):
        return (cls, len(value)) if len(value) > _MANY else (cls, tuple(map(_typed, value)))
    if cls in (set, frozenset):
        return (cls, len(value)) if len(value) > _MANY else (cls, frozenset(map(_typed, value)))
    if isinstance(value, dict):
        if len(value) > _MANY:
            return (cls, len(value))
        return (cls, tuple((_typed(key), _typed(item)) for key, item in value.items()))
    if isinstance(value, _BY_IDENTITY):
        return value
    if cls is MethodType:
        return (cls, value.__func__, real_type(value.__self__))
    if isinstance(value, functools.partial):
        return (cls, token(value.func), token(value.args), token(value.keywords))
    if isinstance(value, tuple | SimpleNamespace):
        parts = vars(value).items() if isinstance(value, SimpleNamespace) else enumerate(value)
        return (cls, tuple((key, _typed(part)) for key, part in parts))
    if dataclasses.is_dataclass(value) and not hasattr(value, "__dict__"):  # with slots: it cannot be watched
        fields = dataclasses.fields(value)
        return (cls, tuple((field.name, _typed(getattr(value, field.name))) for field in fields))
    if isinstance(value, torch.Tensor):
        return (torch.Tensor, tuple(value.shape), value.dtype)
    if not hasattr(value, "__dict__") and hasattr(cls, "__slots__"):
        return (object, cls, _settings(value))
    return (nn.Module if isinstance(value, nn.Module) else object, cls)


def is_transparent(value: Any) -> bool:
    """Whether the token says all there is to know: not of tensors, modules and objects, alone or in containers."""
    cls = real_type(value)
    if cls in _SCALARS or cls is float or isinstance(value, _BY_IDENTITY):
        return True
    if cls in (tuple, list, set, frozenset):
        return len(value) <= _MANY and all(map(is_transparent, value))
    if isinstance(value, dict):
        return len(value) <= _MANY and all(is_transparent(key) and is_transparent(value[key]) for key in value)
    if isinstance(value, functools.partial):
        return is_transparent(value.func) and is_transparent(value.args) and is_transparent(value.keywords)
    return isinstance(value, torch.Tensor)  # an attribute: its structure is compared, its values are no matter


def _typed(value: Any) -> Any:
    """A part of a container: of objects, whose attributes nobody watches there, all settings."""
    cls = real_type(value)
    found = token(value)
    if type(found) is tuple and found[:1] in ((object,), (nn.Module,)):
        return (cls, (*found, _settings(value)))
    return (cls, found)


def _settings(value: Any) -> Any:
    own = getattr(value, "__dict__", None)
    if own is None:
        own = {name: getattr(value, name, None) for name in getattr(type(value), "__slots__", ())}
    return tuple((name, part) for name, part in own.items() if type(part) in (*_SCALARS, float))


def same(found: Any, expected: Any) -> bool:
    """Whether a value has the token ``expected``."""
    if found is expected:
        return True
    if type(expected) is Identity:
        return found is expected.value
    if type(expected) is Parts:
        return expected.hold(found)
    if type(expected) is tuple and len(expected) == 2 and expected[0] in (object, nn.Module):
        return real_type(found) is expected[1]
    if type(found) is not type(expected):
        return type(expected) in (tuple, str) and _equal(token(found), expected)
    return _equal(token(found), expected) if type(found) is tuple else _equal(found, expected)


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def real_type(value: Any) -> type:
    """The class of ``value``, whether or not it is being watched."""
    return unwatched(type(value))


def unwatched(cls: type) -> type:
    """The class itself, of one that tells of reads."""
    return getattr(cls, "slapo_watched", cls)


def describe(expected: Any) -> str:
    """A token, for messages."""
    if expected is ABSENT:
        return "not there"
    if type(expected) is tuple and expected and isinstance(expected[0], type):
        if expected[0] in (tuple, list, set, frozenset, dict) and isinstance(expected[1], int):
            return f"a {expected[0].__name__} of {expected[1]}"
        if expected[0] in (tuple, list):
            return repr(expected[0](_untyped(part) for part in expected[1]))
        if expected[0] is dict:
            return repr({_untyped(key): _untyped(item) for key, item in expected[1]})
        return f"a {getattr(expected[-1], '__name__', expected[0].__name__)}"
    return getattr(expected, "__qualname__", None) or repr(expected)


def _untyped(typed: Any) -> Any:
    value = typed[1]
    return value if not isinstance(value, tuple) else _Text(describe(value))


class _Text(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
