"""Copy a model with the functions that hold its modules."""

from __future__ import annotations

import copy
import dis
import functools
import os
import sys
import sysconfig
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from slapo_core.errors import SerializationError
from slapo_core.private import MODULE_ATTRIBUTES, TENSOR_TABLES
from slapo_core.tree.forward import ModuleForward, ReplacedForward
from slapo_core.tree.index import made_beforehand

__all__ = ["deep_copy", "is_called_through"]


def deep_copy(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Copy a model as ``copy.deepcopy``, and with it the functions that hold its modules.

    ``deepcopy`` shares functions, so that a ``forward`` set on a module, or a hook, whose closure, defaults or globals
    hold modules of the model would go on to call the modules of the original.

    Args:
        model: only read.
        memo: as for ``copy.deepcopy``: the copies made so far; extended.

    Raises:
        SerializationError: a function holds a module of the model in a way that cannot be copied.
    """
    memo = {} if memo is None else memo
    for key, made in made_beforehand(model).items():
        memo.setdefault(key, made)
    copied = copy.deepcopy(model, memo)
    _Rebinding(copied, memo).run()
    return copied


def is_called_through(own: ModuleForward, module: nn.Module, *, itself: bool = False) -> bool:
    """Return whether the forward of a module may call the one that steps had put there.

    Args:
        own: that of the steps.
        module: of which another forward was set since, that may hold it.
        itself: whether to leave out holders of its function alone.
    """
    waiting: list[Any] = [value for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES]
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_HELD:
        each = waiting.pop()
        if each is own or (each is own.__func__ and not itself):
            return True
        if id(each) not in seen and not isinstance(each, nn.Module):
            seen.add(id(each))
            waiting.extend(_parts(each))
    return False


_MOST_HELD = 10_000
_LEAVES = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_NEVER_ENTERED = (torch.Tensor, type, ModuleType, BuiltinFunctionType, CodeType)
_LEAF_TYPES = frozenset(_LEAVES)
_CONTAINERS = frozenset({dict, list, set, tuple, OrderedDict})
_OPEN = (
    nn.Module, ModuleForward, ReplacedForward, FunctionType, MethodType, functools.partial,
    functools._lru_cache_wrapper, CellType, weakref.ref, dict, list, tuple, set, frozenset, deque,
)  # fmt: skip


class _Rebinding:
    """Replaces, in a copy, what holds modules of the original.

    Args:
        copied: by ``deepcopy``.
        memo: of that; extended.
    """

    def __init__(self, copied: nn.Module, memo: dict[int, Any]) -> None:
        self._copied, self._memo = copied, memo
        # These hold none of the original's modules, or are looked at by themselves; the object keeps its id taken.
        self._clean: dict[int, Any] = {id(module): module for module in copied.modules()}
        self._own: set[int] | None = None
        self._globals: dict[int, dict[str, Any]] = {}
        self._entered: list[Any] = []

    def run(self) -> None:
        """
        Raises:
            SerializationError: something holds a module of the original in a way that cannot be copied.
        """
        for path, module in self._copied.named_modules():
            for name, value in list(module.__dict__.items()):
                if type(value) in _LEAF_TYPES or name in TENSOR_TABLES or (type(value) in _CONTAINERS and not value):
                    continue
                try:
                    made = self._twin(value)
                except _NotCopiedError as error:
                    raise _refused(path, name, error.value) from error
                if made is not value:
                    module.__dict__[name] = made
        types = {type(module): path for path, module in self._copied.named_modules()}
        for cls, path in types.items():
            for name, function in _functions_of(cls):
                if any(map(self._holds, function.__closure__ or ())):
                    raise _refused(path, name, cls)

    def _holds(self, value: Any) -> bool:
        """Return whether modules, parameters or buffers of the original are reached from a value."""
        seen: dict[int, Any] = {}
        waiting = [value]
        while waiting:
            each = waiting.pop()
            key = id(each)
            if type(each) in _LEAF_TYPES or key in seen or key in self._clean:
                continue
            if isinstance(each, (nn.Module, torch.Tensor)) and self._memo.get(key, each) is not each:
                return True
            seen[key] = each
            if not self._is_closed(each):
                waiting.extend(_parts(each))
        self._clean.update(seen)
        return False

    def _is_closed(self, value: Any) -> bool:
        """Return whether an object is not looked into: of slapo or a graph, or a library's that the copy shares."""
        cls = type(value)
        if cls in _CONTAINERS or isinstance(value, _OPEN):
            return False
        if cls.__module__.startswith(("slapo_", "torch.fx.")):
            return True
        file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        return _is_installed(file or "") and not self._is_own(value)

    def _twin(self, value: Any) -> Any:
        """Return what takes the place of a value in the copy: itself, unless it holds modules of the original."""
        if type(value) in _LEAF_TYPES:
            return value
        if id(value) in self._memo:
            return self._memo[id(value)]
        if not self._holds(value):
            return value
        self._entered.append(value)
        return self._made(value)

    def _made(self, value: Any) -> Any:
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            return self._keep(value, MethodType(self._twin(value.__func__), self._twin(value.__self__)))
        if type(value) is functools.partial:
            keywords = {name: self._twin(each) for name, each in value.keywords.items()}
            made = functools.partial(self._twin(value.func), *map(self._twin, value.args), **keywords)
            made.__dict__.update(value.__dict__)
            return self._keep(value, made)
        if isinstance(value, (tuple, frozenset)):
            items = list(map(self._twin, value))
            return self._keep(value, value._make(items) if hasattr(value, "_make") else type(value)(items))
        if type(value) is weakref.ref:
            return self._keep(value, weakref.ref(self._twin(value())))
        if isinstance(value, (ModuleForward, ReplacedForward)) and self._is_own(value):
            self._keep(value, value)
            value.rebind(self._twin)
            return value
        return self._object(value)

    def _object(self, value: Any) -> Any:
        """Change an object that the copy owns; of another one make a shallow copy, and change that."""
        made = value
        if not self._is_own(value):
            try:
                made = copy.copy(value)
            except Exception as error:
                raise _NotCopiedError(value) from error
            if made is value or isinstance(value, _NEVER_ENTERED):
                raise _NotCopiedError(value)
        self._keep(value, made)
        if isinstance(made, dict):
            items = [(self._twin(key), self._twin(each)) for key, each in value.items()]
            made.clear()
            made.update(items)
        elif isinstance(made, (list, deque, set)):
            members = list(map(self._twin, value))
            made.clear()
            (made.update if isinstance(made, set) else made.extend)(members)
        for name, each in _attributes(value):
            twin = self._twin(each)
            if twin is not each and name in getattr(made, "__dict__", ()):
                made.__dict__[name] = twin
            elif twin is not each:
                object.__setattr__(made, name, twin)
        return made

    def _function(self, function: FunctionType) -> FunctionType:
        cells = [self._cell(cell) for cell in function.__closure__ or ()]
        closure = tuple(made for _, made in cells) or None
        made = FunctionType(function.__code__, self._globals_of(function), function.__name__, None, closure)
        self._keep(function, made)
        for name in ("__doc__", "__qualname__", "__module__", "__annotations__"):
            setattr(made, name, getattr(function, name))
        for before, after in cells:
            if after is not before and not _is_filled(after):
                after.cell_contents = self._twin(before.cell_contents)
        for name in function.__globals__.keys() & _globals_in(function):
            if made.__globals__ is not function.__globals__:
                made.__globals__[name] = self._twin(function.__globals__[name])
        made.__defaults__ = self._twin(function.__defaults__)
        made.__kwdefaults__ = self._twin(function.__kwdefaults__)
        made.__dict__.update({name: self._twin(each) for name, each in function.__dict__.items()})
        return made

    def _cell(self, cell: CellType) -> tuple[CellType, CellType]:
        """Return a cell and its twin, which functions share as they did; the cell itself where nothing changes."""
        if id(cell) not in self._memo and self._changes(cell):
            self._keep(cell, CellType())
        return cell, self._memo.get(id(cell), cell)

    def _changes(self, cell: CellType) -> bool:
        if not _is_filled(cell):
            return False
        inside = cell.cell_contents
        return type(inside) not in _LEAF_TYPES and (id(inside) in self._memo or self._holds(inside))

    def _globals_of(self, function: FunctionType) -> dict[str, Any]:
        """Return the globals; a copy of them where a name that the function uses holds a module of the original."""
        given = function.__globals__
        if not any(self._holds(given.get(name)) for name in _globals_in(function)):
            return given
        return self._globals.setdefault(id(given), dict(given))

    def _keep(self, value: Any, made: Any) -> Any:
        self._memo[id(value)] = made
        return made

    def _is_own(self, value: Any) -> bool:
        """Return whether ``deepcopy`` made an object, so that the user does not have it."""
        if self._own is None:
            self._own = {id(made) for key, made in self._memo.items() if id(made) != key}
        return id(value) in self._own


class _NotCopiedError(Exception):
    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.value = value


def _refused(path: str, name: str, value: Any) -> SerializationError:
    owner = f"'{path}'" if path else "the model"
    called = getattr(value, "__qualname__", type(value).__qualname__)
    return SerializationError(
        f"the model cannot be copied: '{name}' of {owner} holds a module of the model through {called}, so that a copy "
        "would call the original",
        hint="take the module from an argument of the function or an attribute of its owner, e.g. "
        "functools.partial(run, module)",
    )


def _is_filled(cell: CellType) -> bool:
    """Return whether a cell has contents yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _parts(value: Any) -> Iterator[Any]:
    """Yield what a value holds, one level deep."""
    if isinstance(value, FunctionType):
        yield from value.__closure__ or ()
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        yield from value.__dict__.values()
        yield from (value.__globals__[name] for name in value.__globals__.keys() & _globals_in(value))
    elif isinstance(value, CellType):
        if _is_filled(value):
            yield value.cell_contents
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif type(value) is weakref.ref:
        yield value()
    elif isinstance(value, ReplacedForward):
        yield from value.held_functions()
    elif not isinstance(value, _NEVER_ENTERED):
        if isinstance(value, dict):
            yield from value.keys()
            yield from value.values()
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            yield from value
        if type(value) not in _CONTAINERS:
            yield from (each for _, each in _attributes(value))


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from list(getattr(value, "__dict__", {}).items())
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            own = f"_{cls.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
            if name not in ("__dict__", "__weakref__") and hasattr(value, own):
                yield own, getattr(value, own)


def _functions_of(cls: type) -> Iterator[tuple[str, FunctionType]]:
    """Yield the methods of a class of the user's that have a closure; a copy calls no constructor."""
    for each in cls.__mro__:
        if each is nn.Module:
            return
        for name, function in vars(each).items():
            is_called = isinstance(function, FunctionType) and name not in ("__init__", "__new__")
            if is_called and function.__closure__ and _is_users(function):
                yield name, function


@functools.lru_cache(maxsize=1024)
def _names_in(code: CodeType) -> frozenset[str]:
    """List the globals that a code, and the functions defined in it, read."""
    names = {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    inside = (_names_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(names).union(*inside)


def _globals_in(function: FunctionType) -> frozenset[str]:
    """List the globals of a function of the user's; none of a library's, which knows no model."""
    return _names_in(function.__code__) if _is_users(function) else frozenset()


def _is_users(function: FunctionType) -> bool:
    return not _is_installed(function.__globals__.get("__file__") or "")


@functools.lru_cache(maxsize=1024)
def _is_installed(file: str) -> bool:
    paths = (os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("purelib", "platlib", "stdlib"))
    return os.path.realpath(file).startswith(tuple(paths))
