"""Global names that recorded code reads: constants and functions of the model's source files."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor

from slapo_core.graph.location import is_of_the_model
from slapo_core.graph.mutations import is_unchanged, put_back
from slapo_core.graph.sizes import is_symbolic
from slapo_core.graph.structure import Opaque
from slapo_core.graph.tokens import Identity, Parts, is_transparent, real_type, token
from slapo_core.spec.tracer import Flag

__all__ = ["Surroundings"]

_PYTHON = str(Path(sysconfig.__file__).parent)
_MOST_FUNCTIONS = 300
_MOST_PARTS = 16
_CONTAINERS = (tuple, list, dict, set, frozenset)


class Surroundings:
    """The global names in the source of what a recording may run, with their values.

    Until :meth:`put_back`, ``type`` is one of them: it gives the class that an object has outside of a recording.

    Names are taken from the code, not from what was executed: those of branches not taken are among them. Followed are
    functions of the model's own files and methods of the recorded modules; not torch, and no closures.

    Args:
        forward: that is recorded.
        modules: whose code is recorded.
    """

    def __init__(self, forward: Callable[..., Any], modules: Iterable[nn.Module]) -> None:
        self._values: dict[tuple[str, tuple[str, ...], str], tuple[Any, Any, Any]] = {}
        self._copies: dict[int, Any] = {}
        classes = {type(module) for module in modules}
        waiting = [*_functions_in(forward), *(_function(getattr(cls, "forward", None)) for cls in classes)]
        seen: set[int] = set()
        holders = (sys.modules.get(base.__module__) for cls in classes for base in cls.__mro__)
        tables = {id(vars(holder)): vars(holder) for holder in holders if holder is not None and _is_source(holder)}
        while waiting and len(seen) < _MOST_FUNCTIONS:
            function = waiting.pop()
            if function is None or id(function.__code__) in seen or not _is_followed(function.__code__.co_filename):
                continue
            seen.add(id(function.__code__))
            names = _names(function.__code__)
            waiting += [_function(getattr(cls, name, None)) for cls in classes for name in names]
            waiting += [*_functions_in(function), *self._note_all(function, names)]
            tables[id(function.__globals__)] = function.__globals__
        self._with_type = [table for table in tables.values() if "type" not in table]
        for table in self._with_type:
            table["type"] = _TypeOutside

    @property
    def flags(self) -> tuple[Flag, ...]:
        """What a graph depends on."""
        return tuple(
            Flag(path, name, expected, owner) for (owner, path, name), (_, _, expected) in self._values.items()
        )

    def put_back(self) -> str | None:
        """Give the names their values again, and lists and dictionaries their contents; the first that had changed."""
        for table in self._with_type:
            del table["type"]
        changed = None
        for (owner, path, name), (table, value, _) in self._values.items():
            is_other = table.get(name) is not value
            if is_other:
                table[name] = value
            if isinstance(value, (list, dict, set)):
                is_other = is_other or not is_unchanged(value, self._copies[id(value)])
                put_back(value, self._copies[id(value)])
            if is_other and changed is None:
                changed = ".".join((owner, *path, name))
        return changed

    def _note_all(self, function: FunctionType, names: set[str]) -> Iterator[FunctionType | None]:
        """Note what ``function`` reads by ``names``; the functions among it."""
        holder = sys.modules.get(function.__module__ or "")
        if holder is None or holder.__dict__ is not function.__globals__:
            return
        for name in names.intersection(function.__globals__):
            value = function.__globals__[name]
            yield _function(value)
            self._note(holder.__name__, (), name, function.__globals__)
            if isinstance(value, ModuleType) and _is_followed(getattr(value, "__file__", None) or "<"):
                for own in names.intersection(vars(value)):
                    yield _function(vars(value)[own])
                    self._note(value.__name__, (), own, vars(value))
            elif not callable(value) and type(value).__module__ == holder.__name__:  # CONFIG = Config()
                for own in names.intersection(getattr(value, "__dict__", {})):
                    self._note(holder.__name__, (name,), own, value.__dict__)

    def _note(self, owner: str, path: tuple[str, ...], name: str, table: dict[str, Any]) -> None:
        value = table[name]
        if isinstance(value, torch.Tensor):
            self._values[owner, path, name] = (table, value, Identity(value))
        elif _is_setting(value):
            holds_tensors = isinstance(value, list | tuple | dict) and bool(Parts(value).parts)
            self._values[owner, path, name] = (table, value, Parts(value) if holds_tensors else token(value))
            if isinstance(value, (list, dict, set)):
                self._copies[id(value)] = value.copy()


class _AnswersOutside(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return type(*args, **kwargs)
        value = args[0]
        if isinstance(value, FakeTensor):
            return torch.Tensor
        if type(value) is torch.SymBool and is_symbolic(value):
            return bool
        return value.__class__ if is_symbolic(value) or type(value) is Opaque else real_type(value)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return issubclass(subclass, type)


class _TypeOutside(type, metaclass=_AnswersOutside):
    """``type`` for recorded code: of what is watched, or stands for a number or a tensor, the class outside."""


def _is_source(holder: ModuleType) -> bool:
    """Whether a Python module is the model's; an interactive ``__main__`` has no file."""
    return _is_followed(getattr(holder, "__file__", None) or holder.__name__)


def _is_followed(file: str) -> bool:
    is_of_python = file.startswith(_PYTHON) and "site-packages" not in file
    return is_of_the_model(file) and not is_of_python


def _is_setting(value: Any) -> bool:
    """What is cheap to compare at every call: functions, numbers, texts, and a few of them."""
    if isinstance(value, type | ModuleType):
        return False
    if isinstance(value, FunctionType):
        return _is_followed(value.__code__.co_filename)
    return is_transparent(value) and (not isinstance(value, _CONTAINERS) or len(value) <= _MOST_PARTS)


def _functions_in(function: Any) -> Iterator[FunctionType | None]:
    """A function, and what it wraps."""
    for one in (function, getattr(function, "__wrapped__", None)):
        yield _function(one)
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield _function(cell.cell_contents)
        except ValueError:  # still empty
            continue


def _function(value: Any) -> FunctionType | None:
    value = getattr(value, "__func__", value)
    return value if isinstance(value, FunctionType) else None


def _names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names
