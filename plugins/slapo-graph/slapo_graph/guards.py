"""Guards on the attributes and global names that a recorded forward read."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from slapo_graph.private import tables_of
from slapo_graph.protocol import Flag

_SCALARS = (bool, int, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout)
_BY_IDENTITY = (FunctionType, BuiltinFunctionType, ModuleType, type, Enum)


class ABSENT:
    """The fingerprint of a missing attribute."""


class Same:
    """The fingerprint of a global name that is, or holds, tensors: they must be the very same objects.

    Args:
        value: the object.
    """

    def __init__(self, value: Any) -> None:
        self.told = fingerprint(value, _Itself)

    def holds(self, found: Any) -> bool:
        """Return whether ``found`` has the same tensors and values in the same positions."""
        return bool(fingerprint(found, _Itself) == self.told)

    def __repr__(self) -> str:
        return "the same tensors"


class _Itself:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return type(other) is _Itself and other.tensor is self.tensor

    def __hash__(self) -> int:
        return id(self.tensor)


def _shape_and_type(tensor: torch.Tensor) -> Any:
    return torch.Tensor, tuple(tensor.shape), tensor.dtype


def fingerprint(value: Any, of_tensor: Callable[[torch.Tensor], Any] = _shape_and_type) -> Any:
    """Return the fingerprint by which a value is compared.

    Copies of a model have equal fingerprints: objects count by their class, and tensors by shape and dtype.
    """
    cls = type(value)
    if cls in _SCALARS:
        return value
    if cls is float:
        return value if value == value else "nan"
    if isinstance(value, _BY_IDENTITY):
        return value
    if isinstance(value, torch.Tensor):
        return of_tensor(value)
    parts = _parts(value)
    if parts is not None:
        return (cls, tuple((key, _of_part(part, of_tensor)) for key, part in parts))
    if cls in (set, frozenset):
        return (cls, frozenset(_of_part(part, of_tensor) for part in value))
    if cls is MethodType:
        return (cls, value.__func__, type(value.__self__))
    if not hasattr(value, "__dict__") and hasattr(cls, "__slots__"):  # it cannot be watched
        return (object, cls, _settings(value))
    return (nn.Module if isinstance(value, nn.Module) else object, cls)


def _parts(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return an ordered container's items with keys, or None."""
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, tuple | list):
        return enumerate(value)
    if isinstance(value, SimpleNamespace):
        return vars(value).items()
    if isinstance(value, functools.partial):
        return (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not hasattr(value, "__dict__"):
        return ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    return None


def _of_part(value: Any, of_tensor: Callable[[torch.Tensor], Any]) -> Any:
    """Snapshot an element of a container: its class, and the settings of objects, which have no guard there."""
    found = fingerprint(value, of_tensor)
    if type(found) is tuple and found[:1] in ((object,), (nn.Module,)):
        found = (*found, _settings(value))
    return (type(value), found)


def _settings(value: Any) -> Any:
    own = getattr(value, "__dict__", None)
    if own is None:
        own = {name: getattr(value, name, None) for name in getattr(type(value), "__slots__", ())}
    return tuple((name, part) for name, part in own.items() if type(part) in (*_SCALARS, float))


def is_told(value: Any) -> bool:
    """Return whether the fingerprint is complete: not of modules and objects, alone or in containers."""
    cls = type(value)
    if cls in _SCALARS or cls is float or isinstance(value, (*_BY_IDENTITY, torch.Tensor)):
        return True
    if isinstance(value, dict):
        return all(is_told(key) and is_told(value[key]) for key in value)
    if cls in (tuple, list, set, frozenset):
        return all(map(is_told, value))
    return isinstance(value, functools.partial) and is_told((value.func, value.args, value.keywords))


def is_setting(value: Any) -> bool:
    """Return whether code may branch on an attribute with this value."""
    return isinstance(value, bool | int | float | str | tuple | list | dict | torch.dtype | Enum | type(None))


def _is_same(found: Any, expected: Any) -> bool:
    """Return whether a value has the expected fingerprint."""
    if type(expected) is tuple and len(expected) == 2 and expected[0] in (object, nn.Module):
        return type(found) is expected[1]
    if type(expected) is Same:
        return bool(expected.holds(found))
    if type(expected) in (list, dict, set) or (type(expected) is tuple and not _is_of_container(expected)):
        return type(found) is type(expected) and bool(found == expected)  # the value itself, as a tracer may give it
    now = fingerprint(found)
    return type(now) is type(expected) and bool(now == expected)


def _is_of_container(expected: tuple[Any, ...]) -> bool:
    return bool(expected) and isinstance(expected[0], type)


def describe(expected: Any) -> str:
    """Describe a fingerprint for messages."""
    if expected is ABSENT:
        return "not there"
    if type(expected) is tuple and _is_of_container(expected):
        if expected[0] is torch.Tensor:
            return f"a tensor of shape {expected[1]} and {expected[2]}"
        if expected[0] in (tuple, list):
            return repr(expected[0](_Text(describe(part)) for _, (_, part) in expected[1]))
        if expected[0] is dict:
            return repr({key: _Text(describe(part)) for key, (_, part) in expected[1]})
        return f"a {getattr(expected[1], '__name__', expected[0].__name__)}"
    return getattr(expected, "__qualname__", None) or repr(expected)


class _Text(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class Checks:
    """The flags of a graph, grouped by the objects that have them, to be checked at every call.

    Args:
        flags: of one recording.
        index: position of the recorded modules, by path, in the list given to :meth:`violated`.
    """

    def __init__(self, flags: Iterable[Flag], index: Mapping[str, int]) -> None:
        groups: dict[Any, list[Flag]] = {}
        for flag in flags:
            if flag.owner is not None:
                groups.setdefault((flag.owner, flag.path), []).append(flag)
                continue
            depth = next(depth for depth in range(len(flag.path), -1, -1) if ".".join(flag.path[:depth]) in index)
            groups.setdefault((index[".".join(flag.path[:depth])], flag.path[depth:]), []).append(flag)
        self._groups = [
            (
                sys.modules.get(start) if isinstance(start, str) else start,
                holders,
                tuple((flag.attribute, flag.expected, flag) for flag in members),
            )
            for (start, holders), members in groups.items()
        ]

    def violated(self, modules: list[nn.Module]) -> tuple[Flag, Any] | None:
        """Return the first changed flag and its present value."""
        for start, holders, members in self._groups:
            owner: Any = modules[start] if type(start) is int else start
            for name in holders:
                owner = getattr(owner, name, ABSENT)
            own = getattr(owner, "__dict__", {})
            for name, expected, flag in members:
                found = own.get(name, ABSENT)
                if found is expected:
                    continue
                if found is ABSENT:
                    found = _of_class(owner, name) if isinstance(owner, nn.Module) else getattr(owner, name, ABSENT)
                if found is not expected and not _is_same(found, expected):
                    return flag, found
        return None


def _of_class(module: nn.Module, name: str) -> Any:
    """Look an attribute up outside of the instance, without a module's slow AttributeError."""
    for table in tables_of(module):
        if name in table:
            return table[name]
    return getattr(module, name) if hasattr(type(module), name) else ABSENT
