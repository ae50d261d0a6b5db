"""Which attributes of modules and their configuration a forward reads while it is recorded."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from slapo_core.graph.structure import is_plain
from slapo_core.spec.tracer import Flag

__all__ = ["Flags"]

_DEPTH = 4
_NO_HOLDERS = (nn.Module, torch.Tensor, list, tuple, dict, set, type, type(len), type(lambda: 0))


class Flags:
    """Watches reads by giving the objects, for as long as the recording lasts, a class that tells of them.

    Args:
        refuse: makes the error for a forward that sets attributes.
    """

    def __init__(self, refuse: Any) -> None:
        self.refuse = refuse
        self._seen: dict[tuple[tuple[str, ...], str], Any] = {}
        self._watched: dict[int, tuple[Any, type]] = {}

    @property
    def seen(self) -> tuple[Flag, ...]:
        """Every attribute that was read, once; but not the training mode, which decides between variants."""
        return tuple(Flag(path, name, value) for (path, name), value in self._seen.items() if name != "training")

    @contextlib.contextmanager
    def watching(self, modules: dict[str, nn.Module]) -> Iterator[None]:
        """Watch ``modules``, by path relative to the recorded one, and plain objects that are read from them."""
        try:
            for path, module in modules.items():
                self._watch(module, tuple(path.split(".")) if path else ())
            yield
        finally:
            for value, cls in self._watched.values():
                object.__setattr__(value, "__class__", cls)

    def _watch(self, value: Any, path: tuple[str, ...]) -> None:
        if id(value) in self._watched:
            return
        cls: Any = type(value)
        watch = self

        def read(this: Any, name: str) -> Any:
            found = cls.__getattribute__(this, name)
            if not name.startswith("__"):
                watch._read(this, path, name, found)
            return found

        def write(this: Any, name: str, new: Any) -> None:
            if getattr(this, name, watch) is new:  # `self.count += 1`: the tensor was changed, and stays where it is
                return
            raise watch.refuse(f"sets {'.'.join(('self', *path, name))}")

        members = {"__getattribute__": read, "__setattr__": write, "__module__": cls.__module__}
        members["__qualname__"] = cls.__qualname__
        try:
            watched = type(cls)(cls.__name__, (cls,), members)
            object.__setattr__(value, "__class__", watched)
        except TypeError:
            return
        self._watched[id(value)] = (value, cls)

    def _read(self, this: Any, path: tuple[str, ...], name: str, found: Any) -> None:
        if name not in object.__getattribute__(this, "__dict__"):
            return
        if is_plain(found):
            self._seen.setdefault((path, name), copy.copy(found))
        elif hasattr(found, "__dict__") and not isinstance(found, _NO_HOLDERS) and len(path) < _DEPTH:
            self._watch(found, (*path, name))
