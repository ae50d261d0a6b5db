"""Guards of a call: the key of its variant, and checks of attributes and global names."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from itertools import repeat
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from slapo_core.internals import children_of, parameters_of
from slapo_graph import autocast_state
from slapo_graph.arguments import MISSING
from slapo_graph.private import CHILDREN, is_any_autocast_enabled, tables_of
from slapo_graph.protocol import Flag
from slapo_graph.structure import children, is_plain

# Fingerprints of values.

_SCALARS = (bool, int, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout)
_BY_IDENTITY = (FunctionType, BuiltinFunctionType, ModuleType, type, Enum)


class ABSENT:
    """The fingerprint of a missing attribute."""


class Same:
    """The fingerprint of a global name that is or holds tensors; only the same objects match.

    Args:
        value: the object.
    """

    def __init__(self, value: Any) -> None:
        self.expected = fingerprint(value, _Itself)

    def holds(self, found: Any) -> bool:
        """Return whether ``found`` has the same tensors and values in the same positions."""
        return bool(fingerprint(found, _Itself) == self.expected)

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

    Copies of a model have equal fingerprints: of objects their class, of tensors shape and dtype.
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
    """Return the fingerprint of an element of a container, with its class and the settings of objects."""
    found = fingerprint(value, of_tensor)
    if type(found) is tuple and found[:1] in ((object,), (nn.Module,)):
        found = (*found, _settings(value))
    return (type(value), found)


def _settings(value: Any) -> Any:
    own = getattr(value, "__dict__", None)
    if own is None:
        own = {name: getattr(value, name, None) for name in getattr(type(value), "__slots__", ())}
    return tuple((name, part) for name, part in own.items() if type(part) in (*_SCALARS, float))


def has_full_fingerprint(value: Any) -> bool:
    """Return whether a fingerprint covers a value entirely; for modules and other objects it does not."""
    cls = type(value)
    if cls in _SCALARS or cls is float or isinstance(value, (*_BY_IDENTITY, torch.Tensor)):
        return True
    if isinstance(value, dict):
        return all(has_full_fingerprint(key) and has_full_fingerprint(value[key]) for key in value)
    if cls in (tuple, list, set, frozenset):
        return all(map(has_full_fingerprint, value))
    return isinstance(value, functools.partial) and has_full_fingerprint((value.func, value.args, value.keywords))


def is_setting(value: Any) -> bool:
    """Return whether code may branch on an attribute with this value."""
    return isinstance(value, bool | int | float | str | tuple | list | dict | torch.dtype | Enum | type(None))


def _has_fingerprint(found: Any, expected: Any) -> bool:
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


# Checks of attributes and global names.


class Checks:
    """The flags of a graph, grouped by owner, to be checked at every call.

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

    def violated(self, modules: Sequence[nn.Module]) -> tuple[Flag, Any] | None:
        """Return the first changed flag and its present value."""
        return _violated(self._groups, modules)

    def bound(self, modules: Sequence[nn.Module]) -> BoundChecks:
        """Return the checks for these modules, which violate none now."""
        return BoundChecks(self._groups, modules)


_Groups = list[tuple[Any, tuple[str, ...], tuple[tuple[str, Any, Flag], ...]]]
"""The number of a module, or another object; the names from there to an owner; the owner's flags."""


def _violated(groups: _Groups, modules: Sequence[nn.Module]) -> tuple[Flag, Any] | None:
    for start, holders, members in groups:
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
            if found is not expected and not _has_fingerprint(found, expected):
                return flag, found
    return None


class BoundChecks:
    """The checks of a graph at given modules: quick while no object was replaced.

    Mutable values (a list, a tensor), and attributes outside of the instance's dictionary, are compared as for any
    modules.

    Args:
        groups: of :class:`Checks`.
        modules: as of :meth:`Checks.violated`; the first, their root, is not kept.
    """

    def __init__(self, groups: _Groups, modules: Sequence[nn.Module]) -> None:
        self._root, self._below = type(modules[0]), tuple(modules[1:])
        self._others: _Groups = []
        links: list[_Link] = []
        objects: list[Any] = []
        classes: list[tuple[type, str, Any]] = []
        for start, holders, members in groups:
            path, owner = _links(modules[start] if type(start) is int else start, holders)
            if path is None:
                self._others.append((start, holders, members))
                continue
            links += path
            own, cls, others = owner.__dict__, type(owner), []
            for name, expected, flag in members:
                found = own.get(name, ABSENT)
                if found is ABSENT and expected is not ABSENT:
                    found = getattr(cls, name, ABSENT)
                    if type(found) not in _SCALARS or getattr(owner, name, ABSENT) is not found:
                        others.append((name, expected, flag))
                        continue
                    classes.append((cls, name, found))
                    objects.append(owner)
                    found = ABSENT
                elif found is not expected and not _is_constant(found):
                    if expected not in ((object, type(found)), (nn.Module, type(found))):
                        others.append((name, expected, flag))
                        continue
                    objects.append(found)
                links.append((own, name, found))
            if others:
                self._others.append((start, holders, tuple(others)))
        root = modules[0].__dict__
        below = {(id(own), name): (own, name, value) for own, name, value in links if own is not root}
        self._of_root = [(name, value) for own, name, value in links if own is root]
        self._of_classes = classes
        self._owners, self._names, self._values = tuple(zip(*below.values(), strict=True)) or ((), (), ())
        self._objects = [each for each in objects if each is not modules[0]]
        self._types = [*map(type, self._objects)]

    def hold(self, root: nn.Module) -> bool:
        """Return whether no flag changed; ``root`` is the first module."""
        own = root.__dict__
        for name, value in self._of_root:
            if own.get(name, ABSENT) is not value:
                return False
        for cls, name, value in self._of_classes:
            if getattr(cls, name, ABSENT) is not value:
                return False
        return (
            type(root) is self._root
            and (not self._owners or all(map(is_, map(dict.get, self._owners, self._names, _ABSENT), self._values)))
            and (not self._objects or [*map(type, self._objects)] == self._types)
            and (not self._others or _violated(self._others, (root, *self._below)) is None)
        )


_ABSENT = repeat(ABSENT)
_Link = tuple[dict[str, Any], str, Any]
"""A dictionary, a name, and its value there, or ABSENT."""


def _links(owner: Any, holders: tuple[str, ...]) -> tuple[list[_Link] | None, Any]:
    """Return the links by which names lead from one object to another, and the other; None if one is computed."""
    links: list[_Link] = []
    for name in holders:
        own = getattr(owner, "__dict__", {})
        if name not in own and isinstance(owner, nn.Module) and name in children_of(owner):
            links.append((own, CHILDREN, children_of(owner)))
            own = children_of(owner)
        elif name not in own or getattr(owner, name, ABSENT) is not own[name]:
            return None, None
        owner = own[name]
        links.append((own, name, owner))
    return (links, owner) if type(getattr(owner, "__dict__", None)) is dict else (None, None)


def _is_constant(value: Any) -> bool:
    """Return whether a value has one fingerprint as long as it lives."""
    cls = type(value)
    if cls is tuple or cls is frozenset:
        return all(map(_is_constant, value))
    return cls in _SCALARS or cls is float or isinstance(value, _BY_IDENTITY)


def _of_class(module: nn.Module, name: str) -> Any:
    """Look an attribute up outside of the instance, without a module's slow AttributeError."""
    for table in tables_of(module):
        if name in table:
            return table[name]
    return getattr(module, name) if hasattr(type(module), name) else ABSENT


# The key of a call.


def call_key(modules: Sequence[nn.Module], values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what decides which variant runs, besides the structure of the modules and :class:`Checks`.

    Args:
        modules: the traced one, and those below.
        values: of the forward's parameters, in their order.
    """
    return (
        signatures(values),
        tuple([module.training for module in modules]),
        tuple(
            [
                (tensor.dtype, tensor.requires_grad)
                for module in modules
                for tensor in parameters_of(module).values()
                if tensor is not None
            ]
        ),
        autocast_state.state(),
        torch.get_default_dtype(),
        not torch.compiler.is_compiling() and torch.is_inference_mode_enabled(),  # dynamo cannot say
    )


def surroundings() -> tuple[Any, ...]:
    """Return the global modes that decide how a call computes, for the quick key."""
    return (
        torch.is_grad_enabled(),
        autocast_state.state() if is_any_autocast_enabled() else None,
        torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
    )


def signature(value: Any) -> Any:
    """Return an argument's input signature, equal for calls that one recording serves.

    The type, number of axes and device of tensors; the kind of numbers, not their size; the values of strings, bools
    and None; the structure of containers.
    """
    if value is None or value is MISSING:
        return value
    if isinstance(value, torch.Tensor):
        return (torch.Tensor, value.dtype, value.dim(), value.device.type)
    cls = type(value)
    if cls is int or cls is float:
        return cls
    if cls is bool or cls is str:
        return (cls, value)
    parts = children(value)
    if parts is not None:
        return (cls, tuple([(key, signature(part)) for _, key, part in parts]))
    if cls is set:
        return (cls, frozenset(value)) if is_plain(value) else cls
    return (cls, value) if is_plain(value) and not isinstance(value, slice) else cls


def call_signature(values: tuple[Any, ...], names: Iterable[str]) -> tuple[Any, ...]:
    """Return a key of a call that is quick to make.

    Calls with equal keys bind alike and have equal :func:`signatures`.

    Args:
        values: of all arguments.
        names: of the keyword arguments, which come last.
    """
    key: list[Any] = [len(values), *names]
    tensors: list[int] = []
    for value in values:
        if value is None:
            key.append(None)
        elif type(value) is torch.Tensor:
            tensors.append(id(value))
            key.append((value.dtype, value.dim(), value.device))
        else:
            key.append(_quick_signature(value, tensors))
    if len(tensors) > 1 and len(set(tensors)) < len(tensors):
        key.append(tuple([tensors.index(tensor) for tensor in tensors]))
    return tuple(key)


def _quick_signature(value: Any, tensors: list[int]) -> Any:
    """Return a value's signature with full devices; add the identities of its tensors to ``tensors``."""
    cls = type(value)
    if cls is bool or cls is str:
        return value
    if isinstance(value, torch.Tensor):
        tensors.append(id(value))
        return (value.dtype, value.dim(), value.device)
    if cls is tuple or cls is list:
        return (cls, *[_quick_signature(part, tensors) for part in value])
    if cls is int or cls is float:
        return cls
    tensors += map(id, _tensors_in((value,)))
    return signature(value)


def signatures(values: tuple[Any, ...]) -> Any:
    """Return the input signatures of a call's arguments, and which tensors are the same: ``f(x, x)``."""
    own = tuple([signature(value) for value in values])
    tensors = _tensors_in(values)
    # By `is`, not by `id`: torch.compile would compile again for each other tensor.
    first = tuple([[other is tensor for other in tensors].index(True) for tensor in tensors])
    return own, None if first == tuple(range(len(tensors))) else first


def _tensors_in(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif value is not None and type(value) not in (bool, int, float, str):
            parts = children(value)
            if parts is not None:
                found += _tensors_in([part for _, _, part in parts])
    return found


def exact_signature(value: Any) -> Any:
    """Return an argument's signature with its sizes."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.storage_offset(), value.device, value.requires_grad, value.is_leaf)
    if value is MISSING or isinstance(value, int | float):
        return value
    parts = children(value)
    return None if parts is None else tuple(exact_signature(part) for _, _, part in parts)
