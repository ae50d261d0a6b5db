"""Which attributes of modules and their configuration a forward reads while it is recorded."""

from __future__ import annotations

import contextlib
import enum
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from slapo_core.graph.expected import ABSENT, Same, expected_of
from slapo_core.graph.sizes import is_symbolic
from slapo_core.graph.structure import is_plain
from slapo_core.spec.tracer import Flag

__all__ = ["Flags"]

_NO_HOLDERS = (
    nn.Module, torch.Tensor, list, tuple, dict, set, type, enum.Enum, types.ModuleType, types.MethodType,
    types.FunctionType, types.BuiltinFunctionType, types.GeneratorType,
)  # fmt: skip
_KEPT = (types.FunctionType, types.MemberDescriptorType, staticmethod, classmethod)
_OF_EVERY_MODULE = frozenset((*nn.Module().__dict__, *dir(nn.Module))) - {"training"}


class Flags:
    """Watches reads by giving the objects, for as long as the recording lasts, a class that tells of them.

    Args:
        refuse: makes the error for a forward that sets attributes.
        is_paused: whether what runs now is no part of the recorded code: a module that stays a call.
    """

    def __init__(self, refuse: Callable[[str], Exception], is_paused: Callable[[], bool] = lambda: False) -> None:
        self.refuse, self.is_paused = refuse, is_paused
        self._seen: dict[tuple[tuple[str, ...], str], Any] = {}
        self._watched: dict[int, tuple[Any, type, tuple[str, ...]]] = {}
        self._classes: dict[type, type | None] = {}

    @property
    def seen(self) -> tuple[Flag, ...]:
        """Every attribute that was read, once; one that was looked for and not found, too."""
        return tuple(Flag(path, name, value) for (path, name), value in self._seen.items())

    @contextlib.contextmanager
    def watching(self, modules: dict[str, nn.Module]) -> Iterator[None]:
        """Watch ``modules``, by path relative to the recorded one, and what is read from them."""
        try:
            for path, module in modules.items():
                here = tuple(path.split(".")) if path else ()
                self._watch(module, here)
                if isinstance(module, nn.ModuleList | nn.ModuleDict):  # whose elements no attribute gives
                    for name, child in module.named_children():
                        self._watch(child, (*here, name))
            yield
        finally:
            for value, cls, _ in self._watched.values():
                object.__setattr__(value, "__class__", cls)

    def _watch(self, value: Any, path: tuple[str, ...]) -> bool:
        if id(value) in self._watched:
            return True
        cls: Any = type(value)
        if cls not in self._classes:
            self._classes[cls] = self._telling(cls)
        if self._classes[cls] is None:
            return False
        try:
            object.__setattr__(value, "__class__", self._classes[cls])
        except TypeError:
            return False
        self._watched[id(value)] = (value, cls, path)
        return True

    def _telling(self, cls: Any) -> type | None:
        """A class like ``cls`` whose objects tell what is read from them and set on them; None if there can be none."""
        flags = self

        def read(this: Any, name: str) -> Any:
            try:
                found = cls.__getattribute__(this, name)
            except AttributeError:
                if not name.startswith("__") and not flags.is_paused():
                    flags._missed(this, cls, name)
                raise
            if not name.startswith("__") and not flags.is_paused():
                flags._read(this, name, found)
            return found

        def write(this: Any, name: str, new: Any) -> None:
            if flags.is_paused():
                cls.__setattr__(this, name, new)
            elif getattr(this, name, flags) is not new:  # `self.count += 1` changes a tensor, which stays where it is
                raise flags.refuse(f"sets {'.'.join(('self', *flags._watched[id(this)][2], name))}")

        members = {"__getattribute__": read, "__setattr__": write, "__module__": cls.__module__}
        members["__qualname__"] = cls.__qualname__
        try:
            return type(cls)(cls.__name__, (cls,), members)  # type: ignore[no-any-return]
        except TypeError:
            return None

    def _missed(self, this: Any, cls: Any, name: str) -> None:
        """What the class itself does not have: a registered tensor or module, or nothing."""
        otherwise = getattr(cls, "__getattr__", None)
        try:
            found = otherwise(this, name) if otherwise is not None else ABSENT
        except AttributeError:
            found = ABSENT
        self._read(this, name, found)

    def _read(self, this: Any, name: str, found: Any) -> None:
        entry = self._watched.get(id(this))
        is_module = isinstance(this, nn.Module)
        if entry is None or (is_module and name in _OF_EVERY_MODULE):
            return
        path = entry[2]
        if is_module and name == "training" and len(path) <= 1:
            return  # it decides between variants
        if isinstance(found, nn.Module):
            self._watch(found, (*path, name))
        if isinstance(found, nn.Module | torch.Tensor) or is_symbolic(found) or (path, name) in self._seen:
            return
        known = self._watched.get(id(found))
        if known is not None:
            if known[2] != (*path, name):  # the same object as elsewhere, where its attributes are held
                self._seen[path, name] = Same(found)
            return
        is_holder = found is not ABSENT and hasattr(found, "__dict__") and not isinstance(found, _NO_HOLDERS)
        if is_holder and self._watch(found, (*path, name)):
            return
        if found is ABSENT or is_plain(found) or _is_kept(this, name):
            self._seen[path, name] = expected_of(found)


def _is_kept(this: Any, name: str) -> bool:
    """Whether an attribute gives the same object every time: not so a property."""
    if name in getattr(this, "__dict__", ()):
        return True
    of_class = next((vars(cls)[name] for cls in type(this).__mro__ if name in vars(cls)), ABSENT)
    return of_class is not ABSENT and (isinstance(of_class, _KEPT) or not hasattr(of_class, "__get__"))
