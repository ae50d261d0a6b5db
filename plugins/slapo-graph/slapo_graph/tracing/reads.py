"""Reads of a recorded forward: attributes of modules and their objects, and global names."""

from __future__ import annotations

import contextlib
import enum
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from threading import get_ident
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from slapo_core.internals import forwards, module_index
from slapo_graph.guards import ABSENT, Same, fingerprint, has_full_fingerprint, is_setting
from slapo_graph.leaves import LeafRule, inlined_modules
from slapo_graph.private import TABLES, FakeTensor, methods_put_on
from slapo_graph.protocol import Flag, Location, Untraceable
from slapo_graph.sizes import is_symbolic
from slapo_graph.structure import Opaque, is_plain
from slapo_graph.tracing.diagnostics import is_of_the_model
from slapo_graph.tracing.session import attributes_restored, restore

HolderPath = tuple[str, ...]
_DEPTH = 4
_NO_HOLDERS = (
    nn.Module, torch.Tensor, list, tuple, dict, set, type, type(len), type(lambda: 0), types.ModuleType,
    types.MethodType, types.SimpleNamespace, enum.Enum,
)  # fmt: skip
_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), *dir(nn.Module)})
_OWN_OF_EVERY_MODULE = frozenset(name for name in _OF_EVERY_MODULE if not name.startswith("__"))


class AttributeReads:
    """Note the attributes that are read during a recording, by methods put on the classes.

    Called modules are watched too: their reads decide whether another module shares the recording.

    Args:
        refuse: makes the error for setting an attribute.
        line: of the forward.
        is_paused: whether a called module runs now, not recorded code.
    """

    def __init__(
        self,
        refuse: Callable[[str], Exception],
        line: Location | None = None,
        is_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        self._refuse, self._line, self._is_paused = refuse, line, is_paused
        self._by_code: set[tuple[HolderPath, str]] = set()
        self._found: dict[tuple[HolderPath, str], Any] = {}
        self._set_below: dict[Any, Exception] = {}
        # An attribute that is read after it was written has the forward's own value.
        self._written: set[tuple[HolderPath | None, str]] = set()
        self._places: dict[int, HolderPath] = {}
        self._watched: list[Any] = []  # an id stands for one object only as long as that lives
        self._spied: dict[type, Callable[[], None]] = {}
        self._thread = get_ident()  # of the recording; other threads' reads and writes are not the forward's
        self._of_others: list[tuple[Any, str]] = []
        self._recorded: set[HolderPath] = set()
        self._is_known = True
        self._logs: list[dict[tuple[HolderPath, str], None]] = []

    @contextlib.contextmanager
    def logged(self) -> Iterator[dict[tuple[HolderPath, str], None]]:
        """Log reads by place and name while the block runs, repeated ones too."""
        log: dict[tuple[HolderPath, str], None] = {}
        self._logs.append(log)
        try:
            yield log
        finally:
            self._logs.remove(log)

    def refuse_settings_of(self, called: Iterable[str]) -> None:
        """Refuse plain values that recorded code set at modules which the graph calls.

        Args:
            called: paths of these modules.

        Raises:
            Untraceable: naming the first.
        """
        for below in map(_place, called):
            for path, refused in self._set_below.items():
                if below[: len(path)] == path or path[: len(below)] == below:
                    raise refused

    @property
    def guarded(self) -> tuple[Flag, ...]:
        """Return the reads of recorded code, each once, without the training mode."""
        return tuple(flag for flag in self._flags() if (flag.path, flag.attribute) in self._by_code)

    @property
    def read(self) -> tuple[Flag, ...] | None:
        """Return all reads, of called modules too; None if they include values without a full fingerprint."""
        return self._flags() if self._is_known else None

    def _flags(self) -> tuple[Flag, ...]:
        return tuple(Flag(path, name, expected) for (path, name), expected in self._found.items())

    @contextlib.contextmanager
    def watching(self, root: nn.Module, leaves: LeafRule) -> Iterator[Callable[[], bool]]:
        """Watch ``root``, all modules below and the plain objects read from them, and restore them.

        Gives a function that returns whether all attributes are unchanged.

        Raises:
            Untraceable: recorded code changed the contents of an attribute.
        """
        inlined = inlined_modules(root, leaves)
        self._recorded = set(map(_place, inlined))
        kept = attributes_restored(
            root, inlined.values(), lambda problem: Untraceable(problem, self._line), self._of_others
        )
        with kept as is_unchanged:
            try:
                for path, module in module_index.walk(root):  # a module that is there twice is known by its first path
                    self._watch(module, _place(path))
                yield is_unchanged
            finally:
                for undo in self._spied.values():
                    undo()

    def _watch(self, value: Any, path: HolderPath) -> None:
        if id(value) not in self._places and self._spy(type(value)):
            self._places[id(value)] = path
            self._watched.append(value)

    def _spy(self, cls: Any) -> bool:
        """Put methods on a class that note reads and refuse writes; return whether it accepts them."""
        if cls in self._spied:
            return True
        watch = self
        original = getattr(cls.__getattribute__, "slapo_original", cls.__getattribute__)
        original_set = getattr(cls.__setattr__, "slapo_original", cls.__setattr__)

        ignored = _OWN_OF_EVERY_MODULE if issubclass(cls, nn.Module) else ()

        def read(this: Any, name: str) -> Any:
            if name in ignored or get_ident() != watch._thread:
                return original(this, name)
            if name.startswith("__"):
                is_watched = name == "__dict__" and id(this) in watch._places
                if is_watched and is_of_the_model(sys._getframe(1).f_code.co_filename):
                    watch._read_all(this)
                return original(this, name)
            try:
                found = original(this, name)
            except AttributeError:
                watch._missed(this, name)
                raise
            watch._read(this, name, found)
            return found

        def write(this: Any, name: str, new: Any) -> None:
            if get_ident() != watch._thread:
                watch._of_others.append((this, name))
                original_set(this, name, new)
                return
            path = watch._places.get(id(this))
            # `self.count += 1` on a tensor sets the same object
            is_below = path is not None and path not in watch._recorded and not watch._is_paused()
            if (path in watch._recorded or is_below) and (old := getattr(this, name, watch)) is not new:
                refused = watch._refuse(f"sets {'.'.join(('self', *(path or ()), name))}")
                if (old is None and isinstance(new, (str, bool))) or (old is watch and new is True):
                    refused.settles = this, name, new  # type: ignore[attr-defined]
                if not (is_below and is_plain(new)):
                    raise refused
                watch._set_below.setdefault(path, refused)
            watch._written.add((path, name))
            original_set(this, name, new)

        read.slapo_original, write.slapo_original = original, original_set  # type: ignore[attr-defined]
        undo = methods_put_on(cls, {"__getattribute__": read, "__setattr__": write})
        if undo is not None:
            self._spied[cls] = undo
        return undo is not None

    def _read(self, this: Any, name: str, found: Any) -> None:
        path = self._places.get(id(this))
        if path is None:
            return
        if self._logs and not isinstance(getattr(type(this), name, None), property):  # its own reads are noted
            for log in self._logs:
                log[path, name] = None
        if not self._is_paused():
            self._by_code.add((path, name))
        if hasattr(found, "__dict__") and not isinstance(found, _NO_HOLDERS):
            self._watch_object(found, (*path, name), path)
        if (path, name) in self._found or (path, name) in self._written:
            return
        if name not in object.__getattribute__(this, "__dict__"):
            static = getattr(type(this), name, None)
            if isinstance(static, property) or callable(static) or not is_setting(found):
                return  # a property's own reads are noted; methods are code
        self._note(path, name, found)

    def _read_all(self, this: Any) -> None:
        """Note all settings in the dictionary of attributes, which code asked for."""
        ignored = _OF_EVERY_MODULE if isinstance(this, nn.Module) else ()
        for name, value in tuple(object.__getattribute__(this, "__dict__").items()):
            if name not in ignored and is_setting(value):
                self._read(this, name, value)

    def _missed(self, this: Any, name: str) -> None:
        path = self._places.get(id(this))
        if path is None:
            return
        own = object.__getattribute__(this, "__dict__")
        if not any(name in own.get(table, ()) for table in TABLES):
            for log in self._logs:
                log[path, name] = None
        if not self._is_paused():
            self._by_code.add((path, name))
        if (path, name) in self._found:
            return
        if isinstance(this, nn.Module):
            own = object.__getattribute__(this, "__dict__")
            for table in TABLES:
                if name in own[table]:
                    if own[table][name] is None:
                        self._note(path, name, None)
                    return
            if name in _OF_EVERY_MODULE or type(this).__getattr__ is not nn.Module.__getattr__:
                return
        elif hasattr(type(this), "__getattr__"):
            return
        self._found[path, name] = ABSENT

    def _note(self, path: HolderPath, name: str, found: Any) -> None:
        self._found[path, name] = fingerprint(found)
        self._is_known = self._is_known and (id(found) in self._places or has_full_fingerprint(found))

    def _watch_object(self, value: Any, path: HolderPath, reader: HolderPath) -> None:
        """Watch an object that is not a module, such as a configuration."""
        if len(path) - len(reader) > 1 or len(path) > _DEPTH + max(map(len, self._recorded)):
            return
        known = self._places.get(id(value))
        if known is None:
            self._watch(value, path)
        elif reader in self._recorded and known not in self._recorded:
            self._places[id(value)] = path  # recorded code reads it from here
        if reader in self._recorded and id(value) in self._places:
            self._recorded.add(self._places[id(value)])


def _place(path: str) -> HolderPath:
    return tuple(path.split(".")) if path else ()


# -- global names -----------------------------------------------------------------------------------------------------

_PYTHON = str(Path(sysconfig.__file__).parent)
_MOST_FUNCTIONS = 300
_MOST_PARTS = 16
_CONTAINERS = (tuple, list, dict, set, frozenset)


class GlobalNames:
    """The global names in the source of what a recording may run, with their values.

    The names are from the source code, of branches not taken too: of functions in the model's own files, and of methods
    of the recorded modules; not of torch.

    Args:
        forward: that is recorded.
        modules: whose code is recorded.
    """

    def __init__(self, forward: Callable[..., Any], modules: Iterable[nn.Module]) -> None:
        self._values: dict[tuple[str, HolderPath, str], tuple[dict[str, Any], Any, Any, Any]] = {}
        modules = list(modules)
        classes = {type(module) for module in modules}
        waiting = [*_functions_in(forward), *(_function(getattr(cls, "forward", None)) for cls in classes)]
        waiting += [_function(vars(each)["__call__"]) for cls in classes for each in forwards.overrides_of_call(cls)]
        holders = (sys.modules.get(base.__module__) for cls in classes for base in cls.__mro__)
        self._tables = {id(vars(each)): vars(each) for each in holders if each is not None and is_source(each)}
        self.functions: list[FunctionType] = []
        self.tables: list[tuple[str, dict[str, Any], set[str]]] = []
        followed: set[int] = set()
        while waiting and len(followed) < _MOST_FUNCTIONS:
            function = waiting.pop()
            if function is None or id(function.__code__) in followed or not is_followed(function.__code__.co_filename):
                continue
            followed.add(id(function.__code__))
            self.functions.append(function)
            names = _names(function.__code__)
            waiting += [_function(getattr(cls, name, None)) for cls in classes for name in names]
            waiting += [_function(vars(module)[name]) for module in modules for name in names & vars(module).keys()]
            waiting += [*_functions_in(function), *self._note_all(function, names)]
            self._tables[id(function.__globals__)] = function.__globals__

    @property
    def flags(self) -> tuple[Flag, ...]:
        """Return the flags of the global names."""
        return tuple(Flag(path, name, found[2], owner) for (owner, path, name), found in self._values.items())

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Give the names their values again, and lists and dictionaries their contents.

        Meanwhile ``type`` is replaced: it returns the class that a number or a tensor has outside of a recording.

        Raises:
            Untraceable: one of them was changed.
        """
        tables = [table for table in self._tables.values() if "type" not in table]
        for table in tables:
            table["type"] = _TypeOutside
        try:
            yield
        finally:
            for table in tables:
                del table["type"]
            changed = [key for key, held in self._values.items() if _restore(key[2], *held)]
        if changed:
            owner, path, name = changed[0]
            raise Untraceable(f"changes the global name {'.'.join((owner, *path, name))}")

    def _note_all(self, function: FunctionType, names: set[str]) -> Iterator[FunctionType | None]:
        """Note what ``function`` reads by ``names``; the functions among it."""
        holder = sys.modules.get(function.__module__ or "")
        if holder is None or holder.__dict__ is not function.__globals__:
            return
        self.tables.append((holder.__name__, function.__globals__, names))
        for name in names.intersection(function.__globals__):
            value = function.__globals__[name]
            yield _function(value)
            self._note(holder.__name__, (), name, function.__globals__)
            if isinstance(value, ModuleType) and is_followed(getattr(value, "__file__", None) or "<"):
                self.tables.append((value.__name__, vars(value), names))
                for own in names.intersection(vars(value)):
                    yield _function(vars(value)[own])
                    self._note(value.__name__, (), own, vars(value))
            elif not callable(value) and type(value).__module__ == holder.__name__:  # CONFIG = Config()
                for own in names.intersection(getattr(value, "__dict__", {})):
                    self._note(holder.__name__, (name,), own, value.__dict__)

    def _note(self, owner: str, path: HolderPath, name: str, table: dict[str, Any]) -> None:
        value = table[name]
        if isinstance(value, torch.Tensor) or _is_compared(value):
            contents = value.copy() if isinstance(value, (list, dict, set)) else None
            expected = Same(value) if isinstance(value, (torch.Tensor, tuple, list, dict)) else fingerprint(value)
            self._values[owner, path, name] = (table, value, expected, contents)


def _restore(name: str, table: dict[str, Any], value: Any, _: Any, contents: Any) -> bool:
    """Give a name its value and contents again; whether they had changed."""
    is_other = table.get(name) is not value
    table[name] = value
    return (contents is not None and restore(value, contents)) or is_other


class _AnswersOutside(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return type(*args, **kwargs)
        value = args[0]
        if isinstance(value, FakeTensor):
            return torch.Tensor
        if type(value) is torch.SymBool and is_symbolic(value):
            return bool
        return value.__class__ if is_symbolic(value) or type(value) is Opaque else type(value)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return issubclass(subclass, type)


class _TypeOutside(type, metaclass=_AnswersOutside):
    """``type`` for recorded code; returns the class that symbolic numbers and fake tensors represent."""


def is_source(holder: ModuleType) -> bool:
    """Return whether a Python module is the model's; an interactive ``__main__`` has no file."""
    return is_followed(getattr(holder, "__file__", None) or holder.__name__)


def is_followed(file: str) -> bool:
    is_of_python = file.startswith(_PYTHON) and "site-packages" not in file
    return is_of_the_model(file) and not is_of_python


def _is_compared(value: Any) -> bool:
    """Return whether a value is cheap to compare at every call: a function, number, text, or a few of these."""
    if isinstance(value, type | ModuleType):
        return False
    if isinstance(value, FunctionType):
        return is_followed(value.__code__.co_filename)
    return has_full_fingerprint(value) and (not isinstance(value, _CONTAINERS) or len(value) <= _MOST_PARTS)


def _functions_in(function: Any) -> Iterator[FunctionType | None]:
    """Yield a function, the function that it wraps, and the functions in its closure."""
    for one in (function, getattr(function, "__wrapped__", None)):
        yield _function(one)
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # still empty
            yield _function(cell.cell_contents)


def _function(value: Any) -> FunctionType | None:
    value = getattr(value, "__func__", value)
    return value if isinstance(value, FunctionType) else None


def _names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names
