"""Which attributes of modules and their configuration a forward reads while it is recorded."""

from __future__ import annotations

import contextlib
import enum
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from slapo_core.graph.leaves import LeafRule, inlined_modules, walk
from slapo_core.graph.location import is_of_the_model
from slapo_core.graph.mutations import is_unchanged, put_back
from slapo_core.graph.tokens import ABSENT, is_transparent, token, unwatched
from slapo_core.spec.tracer import Flag, Location

__all__ = ["Flags"]

_DEPTH = 4
_NO_HOLDERS = (
    nn.Module, torch.Tensor, list, tuple, dict, set, type, type(len), type(lambda: 0), types.ModuleType,
    types.MethodType, types.SimpleNamespace, enum.Enum,
)  # fmt: skip
_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), *dir(nn.Module)})
Place = tuple[str, ...]


class Flags:
    """Watches reads by giving the objects, for as long as the recording lasts, a class that tells of them.

    Modules that stay calls are watched too: what they read decides whether another module's recording is the same. What
    they set is taken back; a recorded module that sets something is refused.

    Args:
        refuse: makes the error for a forward that sets attributes.
        is_paused: whether what runs now is a module that stays a call, and no recorded code.
        line: where the forward is written.
    """

    def __init__(
        self, refuse: Any, is_paused: Callable[[], bool] = lambda: False, line: Location | None = None
    ) -> None:
        self.refuse, self.is_paused, self.line = refuse, is_paused, line
        self._by_code: set[tuple[Place, str]] = set()
        self._tokens: dict[tuple[Place, str], Any] = {}
        self._containers: list[tuple[Place, str, Any, Any]] = []
        self._places: dict[int, Place] = {}
        self._classes: dict[type, type] = {}
        self._watched: list[tuple[Any, type]] = []
        self._recorded: set[Place] = set()
        self._set: list[tuple[Any, dict[str, Any]]] = []
        self._is_known = True

    @property
    def seen(self) -> tuple[Flag, ...]:
        """What recorded code read, each attribute once; not the training mode, which decides between variants."""
        return tuple(flag for flag in self._flags() if (flag.path, flag.attribute) in self._by_code)

    @property
    def read(self) -> tuple[Flag, ...] | None:
        """What was read, by modules that stay calls too; None if that included what cannot be looked into."""
        return self._flags() if self._is_known else None

    def _flags(self) -> tuple[Flag, ...]:
        return tuple(Flag(path, name, expected) for (path, name), expected in self._tokens.items())

    @contextlib.contextmanager
    def watching(self, root: nn.Module, leaves: LeafRule) -> Iterator[None]:
        """Watch ``root``, all modules below, and plain objects that are read from them.

        Raises:
            Untraceable: recorded code changed a list, a dictionary or a set that is an attribute.
        """
        self._recorded = {_place(path) for path in inlined_modules(root, leaves)}
        try:
            for path, module in walk(root):  # a module that is there twice is known by its first path
                self._watch(module, _place(path))
            yield
            self._refuse_changes()
        finally:
            for value, cls in self._watched:
                object.__setattr__(value, "__class__", cls)
            self._take_back()

    def _watch(self, value: Any, path: Place) -> None:
        if id(value) in self._places:
            return
        cls = type(value)
        try:
            if cls not in self._classes:
                self._classes[cls] = self._watching_class(cls)
            object.__setattr__(value, "__class__", self._classes[cls])
        except TypeError:  # a class that takes no subclasses, or of another layout: written in C, or with slots
            return
        self._places[id(value)] = path
        self._watched.append((value, cls))

    def _watching_class(self, cls: Any) -> type:
        watch = self

        def read(this: Any, name: str) -> Any:
            if name.startswith("__"):
                if name == "__class__":
                    return cls
                if name == "__dict__" and is_of_the_model(sys._getframe(1).f_code.co_filename):
                    watch._read_all(this)
                return cls.__getattribute__(this, name)
            try:
                found = cls.__getattribute__(this, name)
            except AttributeError:
                watch._missed(this, name)
                raise
            watch._read(this, name, found)
            return found

        def write(this: Any, name: str, new: Any) -> None:
            watch._write(this, name, new)
            cls.__setattr__(this, name, new)

        members = {"__getattribute__": read, "__setattr__": write, "slapo_watched": unwatched(cls)}
        named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        return type(cls)(cls.__name__, (cls,), {**members, **named})

    def _read(self, this: Any, name: str, found: Any) -> None:
        path = self._places.get(id(this))
        is_module = isinstance(this, nn.Module)
        if path is None or (is_module and name in _OF_EVERY_MODULE):
            return
        if not self.is_paused():
            self._by_code.add((path, name))
        if hasattr(found, "__dict__") and not isinstance(found, _NO_HOLDERS):
            self._hold(found, (*path, name), path)
        if (path, name) in self._tokens:
            return
        if name not in object.__getattribute__(this, "__dict__"):
            static = getattr(type(this).__mro__[1], name, None)
            if isinstance(static, property) or callable(static) or not _is_setting(found):
                return  # a property reads what it is made of; methods are code
        self._note(path, name, found)

    def _read_all(self, this: Any) -> None:
        """Code asks for the dictionary of attributes: whatever setting is in it may matter."""
        for name, value in tuple(object.__getattribute__(this, "__dict__").items()):
            if _is_setting(value):
                self._read(this, name, value)

    def _missed(self, this: Any, name: str) -> None:
        path = self._places.get(id(this))
        if path is not None and not self.is_paused():
            self._by_code.add((path, name))
        if path is None or (path, name) in self._tokens:
            return
        if isinstance(this, nn.Module):
            own = object.__getattribute__(this, "__dict__")
            for table in ("_parameters", "_buffers", "_modules"):
                if name in own[table]:
                    if own[table][name] is None:
                        self._note(path, name, None)
                    return
            if name in _OF_EVERY_MODULE or type(this).__getattr__ is not nn.Module.__getattr__:
                return
        elif hasattr(type(this), "__getattr__"):
            return
        self._tokens[path, name] = ABSENT

    def _note(self, path: Place, name: str, found: Any) -> None:
        self._tokens[path, name] = token(found)
        self._is_known = self._is_known and (id(found) in self._places or is_transparent(found))
        if isinstance(found, (list, dict, set)):
            self._containers.append((path, name, found, found.copy()))

    def _hold(self, value: Any, path: Place, reader: Place) -> None:
        """Watch an object that is no module: a configuration."""
        if len(path) - len(reader) > 1 or len(path) > _DEPTH + max(map(len, self._recorded)):
            return
        known = self._places.get(id(value))
        if known is None:
            self._watch(value, path)
        elif reader in self._recorded and known not in self._recorded:
            self._places[id(value)] = path  # recorded code reads it from here
        if reader in self._recorded and id(value) in self._places:
            self._recorded.add(self._places[id(value)])

    def _write(self, this: Any, name: str, new: Any) -> None:
        path = self._places.get(id(this))
        if path is None or getattr(this, name, self) is new:  # `self.count += 1`: the tensor was changed, and stays
            return
        if path in self._recorded:
            raise self.refuse(f"sets {'.'.join(('self', *path, name))}")
        if not any(owner is this for owner, _ in self._set):
            own = object.__getattribute__(this, "__dict__")
            tables = {key: own[key].copy() for key in ("_parameters", "_buffers", "_modules") if key in own}
            self._set.append((this, {**own, **tables}))

    def _refuse_changes(self) -> None:
        for path, name, container, before in self._containers:
            if path in self._recorded and not is_unchanged(container, before):
                error = self.refuse(f"changes {'.'.join(('self', *path, name))}")
                error.location = self.line or error.location
                raise error

    def _take_back(self) -> None:
        for owner, before in self._set:
            own = object.__getattribute__(owner, "__dict__")
            own.clear()
            own.update(before)
        for _, _, container, before in self._containers:
            put_back(container, before)


def _place(path: str) -> Place:
    return tuple(path.split(".")) if path else ()


def _is_setting(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | tuple | list | dict | torch.dtype | enum.Enum | type(None))
