"""Changes of Python objects outside of a graph by recorded code, which the graph would not repeat."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import CellType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from slapo_core.internals import module_index
from slapo_graph.protocol import Location, Untraceable
from slapo_graph.structure import Opaque
from slapo_graph.tracing.diagnostics import first_line
from slapo_graph.tracing.reads import GlobalNames, is_followed, is_source

_CONTAINERS = (list, dict, set, collections.deque, bytearray)
_NO_HOLDERS = (
    bool, int, float, str, type, ModuleType, FunctionType, MethodType,
    torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, Opaque,
)  # fmt: skip
_DEPTH, _MOST = 4, 20_000
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HINT = "return the value; or name the module that does this in leaves= (with flatten=True), or trace a narrower node"

ACTIVE: ContextVar[Outside | None] = ContextVar("slapo_outside", default=None)
"""Watches the forward that is recorded now."""


class Changed(Untraceable):
    """Recorded code changed an object outside of its graph."""


class _Contents:
    """The contents of one object, or of a name in a table, at the beginning.

    Args:
        name: for messages.
        read: returns the present contents, compared by identity.
        restore: sets former contents; None if that is impossible.
    """

    __slots__ = ("contents", "name", "original", "read", "restore")

    def __init__(self, name: str, read: Callable[[], Any], restore: Callable[[Any], None] | None) -> None:
        self.name, self.read, self.restore = name, read, restore
        self.original = self.contents = read()

    def differs(self, before: Any) -> bool:
        now = self.read()
        return len(now) != len(before) or any(one is not other for one, other in zip(now, before, strict=True))


class Outside:
    """Snapshots of the outside objects that a forward may reach.

    These are containers and objects in its arguments, in attributes of its modules, of their classes and of functions
    that it calls, and in the functions' closures, defaults and global names.
    """

    def __init__(self) -> None:
        self._places: dict[Any, _Contents] = {}
        self._alive: list[Any] = []  # an id stands for one object only as long as that lives
        self.is_elsewhere = False

    @classmethod
    def of_call(cls, module: nn.Module, names: GlobalNames, arguments: Mapping[str, Any]) -> Outside:
        """Hold what a forward may reach.

        Args:
            module: the recorded one.
            names: functions and global names of its code.
            arguments: by parameter.
        """
        made = cls()
        for name, value in arguments.items():
            made._hold(value, f"the argument '{name}'")
        classes: dict[type, None] = {}
        for path, below in module_index.walk(module):
            where = f"self.{path}" if path else "self"
            for name, value in below.__dict__.items():
                if name not in _OF_EVERY_MODULE:
                    made._hold(value, f"{where}.{name}")
            classes.update(dict.fromkeys(type(below).__mro__))
        for each in classes:
            if _is_of_model(each):
                made._hold_class(each)
        for function in names.functions:
            made._hold_function(function)
        for owner, table, read in names.tables:
            made._hold_names(table, sorted(read - {"type"}), owner)
        return made

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Accept changes by code that the graph calls again, while the block runs.

        Raises:
            Changed: recorded code changed something before.
        """
        self.check()
        self.is_elsewhere = True
        try:
            yield
        finally:
            self.is_elsewhere = False
        for place in self._places.values():
            if place.differs(place.contents):
                place.contents = place.read()

    def check(self, location: Location | None = None) -> None:
        """Refuse changes of recorded code.

        Raises:
            Changed: naming the first change.
        """
        first = next((place for place in self._places.values() if place.differs(place.contents)), None)
        if first is not None:
            raise Changed(f"changes {first.name} in place, which a graph would not do again", location, _HINT)

    def restore(self) -> None:
        """Restore the contents from before the recording."""
        for place in self._places.values():
            if place.restore is not None and place.differs(place.original):
                place.restore(place.original)
            place.contents = place.original

    # ----------------------------------------------------------------------------------------------------------

    def _add(self, key: Any, this: Any, place: Callable[[], _Contents]) -> bool:
        if key in self._places or len(self._places) >= _MOST:
            return False
        self._alive.append(this)
        self._places[key] = place()
        return True

    def _hold(self, value: Any, name: str, depth: int = 0) -> None:
        if depth > _DEPTH or value is None or isinstance(value, _NO_HOLDERS):
            return
        if isinstance(value, tuple):
            parts: Any = value
        elif isinstance(value, _CONTAINERS):
            if not self._add(id(value), value, lambda: _of_container(value, name)):
                return
            parts = dict.values(value) if isinstance(value, dict) else value
            parts = () if isinstance(value, bytearray) else parts
        else:
            parts = ()
        own = getattr(value, "__dict__", None)
        if type(own) is dict and (
            isinstance(value, (nn.Module, collections.UserDict, collections.UserList, *_CONTAINERS))
            or _is_of_model(type(value))
        ):
            self._hold_names(own, None, name)
            parts = (*parts, *(part for key, part in own.items() if key not in _OF_EVERY_MODULE))
        elif hasattr(type(value), "__slots__") and _is_of_model(type(value)):
            slots = [slot for each in type(value).__mro__ for slot in _slots_of(each)]
            self._add(id(value), value, lambda: _of_attributes(value, slots, name))
            parts = (*parts, *(_attribute(value, slot) for slot in slots))
        for part in list(parts)[:_MOST]:
            self._hold(part, name, depth + 1)

    def _hold_names(self, table: dict[str, Any], names: list[str] | None, owner: str) -> None:
        """Hold entries of a dictionary of attributes or global names; None for all."""
        if names is None:
            self._add(id(table), table, lambda: _of_container(table, owner))
            return
        for name in names:
            where = f"the global name {owner}.{name}"
            self._add((id(table), name), table, functools.partial(_of_name, table, name, where))
            self._hold(table.get(name), where)

    def _hold_class(self, cls: type) -> None:
        for name, value in list(vars(cls).items()):
            if not name.startswith("__"):
                self._hold(value, f"{cls.__qualname__}.{name}")
        self._add(id(cls), cls, lambda: _of_class(cls))

    def _hold_function(self, function: FunctionType) -> None:
        name = function.__qualname__
        self._hold_names(vars(function), None, f"an attribute of {name}")
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._hold(value, f"a default value of {name}")
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            where = f"the variable '{variable}' around {name}"
            if variable != "__class__":
                self._add(id(cell), cell, functools.partial(_of_cell, cell, where))
                self._hold(next(iter(_contents_of_cell(cell)), None), where)


def _of_container(value: Any, name: str) -> _Contents:
    kind: Any = next(each for each in (collections.OrderedDict, *_CONTAINERS) if isinstance(value, each))
    if issubclass(kind, dict):

        def read() -> tuple[Any, ...]:
            return (*kind.keys(value), *kind.values(value))

        def restore(before: Any) -> None:
            half = len(before) // 2
            kind.clear(value)
            for key, part in zip(before[:half], before[half:], strict=True):
                kind.__setitem__(value, key, part)

        return _Contents(name, read, restore)

    def replace(before: Any) -> None:
        kind.clear(value)
        (kind.update if kind is set else kind.extend)(value, before)

    return _Contents(name, lambda: tuple(kind.__iter__(value)), replace)


def _of_attributes(value: Any, names: list[str], where: str) -> _Contents:
    def restore(before: Any) -> None:
        for name, part in zip(names, before, strict=True):
            if part is not _ABSENT:
                object.__setattr__(value, name, part)

    def read() -> tuple[Any, ...]:
        return tuple(_attribute(value, name) for name in names)

    return _Contents(where, read, restore)


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute without noting that it is read."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return _ABSENT


def _of_name(table: dict[str, Any], name: str, where: str) -> _Contents:
    def restore(before: Any) -> None:
        if before[0] is _ABSENT:
            table.pop(name, None)
        else:
            table[name] = before[0]

    return _Contents(where, lambda: (table.get(name, _ABSENT),), restore)


def _of_class(cls: type) -> _Contents:
    def read() -> tuple[Any, ...]:
        own = {name: value for name, value in vars(cls).items() if not name.startswith("_abc") and name[:2] != "__"}
        return (*own, *own.values())

    def restore(before: Any) -> None:
        half = len(before) // 2
        was = dict(zip(before[:half], before[half:], strict=True))
        now = read()
        for name in now[: len(now) // 2]:
            if name not in was:
                delattr(cls, name)
        for name, value in was.items():
            if vars(cls).get(name, _ABSENT) is not value:
                setattr(cls, name, value)

    return _Contents(f"an attribute of the class {cls.__qualname__}", read, restore)


def _of_cell(cell: CellType, where: str) -> _Contents:
    def restore(before: Any) -> None:
        for value in before:
            cell.cell_contents = value

    return _Contents(where, lambda: _contents_of_cell(cell), restore)


def _contents_of_cell(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # still empty
        return ()


class _ABSENT:
    """Marks a missing name."""


def _slots_of(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_of_model(cls: type) -> bool:
    """Return whether a class is written in the model's own files."""
    holder = sys.modules.get(cls.__module__)
    return holder is not None and is_source(holder)


# -- the recorded forward -------------------------------------------------------------------------------------------


def refusing_changes(forward: Callable[..., Any], names: GlobalNames) -> Callable[..., Any]:
    """Refuse a forward that changes objects outside of its graph, or calls itself.

    Args:
        forward: takes the module first.
        names: functions and global names of its code.
    """
    is_running = False

    @functools.wraps(forward)
    def kept(module: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_running
        if is_running:
            raise Untraceable("calls itself", first_line(forward))
        arguments = inspect.signature(forward).bind(module, *args, **kwargs).arguments
        outside = Outside.of_call(module, names, dict(list(arguments.items())[1:]))
        run = functools.partial(forward, module, *args, **kwargs)
        is_running, token = True, ACTIVE.set(outside)
        try:
            out = run()
            outside.check()
        except Changed as error:
            outside.restore()
            if error.location is None:
                error.location = _line_of_change(run, outside) or first_line(forward)
            raise
        finally:
            is_running = False
            ACTIVE.reset(token)
            outside.restore()
        return out

    return kept


def _line_of_change(run: Callable[[], Any], outside: Outside) -> Location | None:
    """Run once more by line up to the change; return the line, or None under a debugger."""
    if sys.gettrace() is not None:
        return None
    last: list[Location] = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if not is_followed(file):
            return None
        if outside.is_elsewhere:
            return None
        if last:
            outside.check(last[0])
        last[:] = [(file, frame.f_lineno)]
        return trace

    sys.settrace(trace)
    try:
        run()
    except Changed as error:
        return error.location
    except Exception:  # noqa: BLE001 - the first run passed
        return None
    finally:
        sys.settrace(None)
    return last[0] if last else None
