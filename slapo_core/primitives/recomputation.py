"""Recompute a forward with the inputs and state of its first run, changing neither again."""

from __future__ import annotations

import contextvars
import copy
import dataclasses
import dis
import functools
import operator
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence, MutableSet, Sequence, Set
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from slapo_core.errors import InputError
from slapo_core.observers import Forward, Origin, happened, run_from
from slapo_core.private import MODULE_ATTRIBUTES, buffers_of, children_of, non_persistent_buffers_of, write_count

_ATOMS = frozenset(
    (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.layout)
)
_CONTAINERS = (MutableSequence, MutableMapping, MutableSet)
_MISSING = object()
_NOT_STATE = MODULE_ATTRIBUTES | {"forward"}


class Recomputation:
    """Calls a forward: first as it is, then to recompute.

    A recompute sees the containers, buffers and attributes of the first run, and its changes to them are dropped.
    Buffers in the state dict are copied before the first run, and other tensors that the module changes in place. It
    runs in the context of the first run: context variables have the values that they had there.

    Args:
        path: of the module, for messages.
        state: the state of the module.
        args: of the forward.
        kwargs: of the forward.
        is_region: whether the forward is a part of the module's, and other modules may share it.

    Raises:
        InputError: a key-value cache is among the inputs; at the recompute: an input was changed in place since the
            first run, or the first run was the first to change a tensor of the module in place.
    """

    __slots__ = ("_changed", "_context", "_has_run", "_inputs", "_is_region", "_kept", "_path", "_state")

    def __init__(
        self,
        path: str,
        state: ModuleState | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_region: bool = False,
    ) -> None:
        self._path, self._is_region, self._has_run, self._changed = path, is_region, False, ""
        self._context = contextvars.copy_context()
        tensors: list[Tensor] = []
        self._kept: dict[int | str, Any] = {}
        done: dict[int, Any] = {}
        given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        for key, value in given:
            if isinstance(value, Tensor):
                tensors.append(value)
            elif type(value) not in _ATOMS:
                _refuse_cache(path, value)
                tensors += tensors_in(value)
                kept = copied(value, done)
                if kept is not value:
                    self._kept[key] = kept
        self._inputs = [(tensor, write_count(tensor)) for tensor in tensors]
        self._state = state.now() if state is not None else None

    def __call__(self, forward: Forward, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._has_run:
            self._has_run = True
            result = forward(module, *args, **kwargs)
            if self._state is not None:
                self._changed = self._state.first_run_ended()
            return result
        return self._context.run(self._again, forward, module, args, kwargs)

    def _again(self, forward: Forward, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check(args, kwargs)
        happened("recomputation", "" if self._is_region else self._path)
        if self._kept:
            kept = copied(self._kept, {})
            args = tuple([kept.get(position, value) for position, value in enumerate(args)])
            kwargs = {name: kept.get(name, value) for name, value in kwargs.items()}
        of_module = Origin(self._path, None, is_below_root=True)  # the backward of another module may ask for it
        if self._state is None:
            return run_from(of_module, forward, module, *args, **kwargs)
        with self._state:
            return run_from(of_module, forward, module, *args, **kwargs)

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor, count in self._inputs:
            if write_count(tensor) != count:
                named = {**{f"input {number}": value for number, value in enumerate(args)}, **kwargs}
                name = next((name for name, value in named.items() if value is tensor), "a nested input")
                raise InputError(
                    f"checkpoint at '{self._path}': {name} {tuple(tensor.shape)} was changed in place after the "
                    "forward began, so that the recompute would start from other values",
                    path=self._path,
                    hint="change a copy (x = act(x) with inplace=False, x = x + y for x += y), or checkpoint a module "
                    "around the one that makes this input",
                )
        if self._changed:
            raise InputError(
                f"checkpoint at '{self._path}': its forward changed {self._changed} in place, but not in its first "
                "call: the recompute lacks its former value",
                path=self._path,
                hint="register it as a buffer of the state dict, register_buffer(..., persistent=True), which is "
                "always copied, or assign a new tensor",
            )


class ModuleState:
    """The state of modules for their forwards: buffers, and attributes that their code assigns.

    Args:
        modules: the modules, those below included.
        changing: names of tensors outside of state dicts that are changed in place, by module; filled by first calls.
    """

    def __init__(self, modules: list[nn.Module], changing: MutableMapping[nn.Module, set[str]]) -> None:
        self._changing = changing
        children = [children_of(module) for module in modules]
        self._leaves = [table for table in children if not table]
        self._below = [(table, tuple(table.values())) for table in children if table]
        self._modules, self._buffers = modules, [buffers_of(module) for module in modules]
        self._attributes: list[tuple[nn.Module, dict[str, Any], tuple[str, ...]]] = []
        written, read = set[str](), set[str]()
        classes: list[Any] = [type(module) for module in modules]
        for module, cls in zip(modules, classes, strict=True):
            forward = vars(module).get("forward")  # set by the user, maybe below the wrappers of steps
            for assigned, named in (_names(cls), _names_in([getattr(forward, "base", forward)], "")):
                written |= assigned
                read |= named
        for module, cls in zip(modules, classes, strict=True) if read else ():
            own = vars(module)
            values = {name: own[name] for name in own.keys() & read}
            names = own.keys() & written | (_names(cls)[0] - buffers_of(module).keys())
            names |= {name for name, value in values.items() if isinstance(value, (Tensor, *_CONTAINERS))}
            self._follow(module, own, names - _NOT_STATE - children_of(module).keys())
            for value in values.values():
                if hasattr(value, "__dict__") and not isinstance(value, (nn.Module, Tensor, type, FunctionType)):
                    self._follow(module, vars(value), vars(value).keys() & written)

    def _follow(self, module: nn.Module, own: dict[str, Any], names: Set[str]) -> None:
        if names:
            self._attributes.append((module, own, tuple(sorted(names))))

    @property
    def is_current(self) -> bool:
        """Whether the modules are still the same."""
        return not any(self._leaves) and all(tuple(table.values()) == children for table, children in self._below)

    def now(self) -> _Snapshot | None:
        """Return the present state; None if there is none."""
        if not self._attributes and not any(self._buffers):
            return None
        holders = [module for module, table in zip(self._modules, self._buffers, strict=True) if table]
        return _Snapshot(holders, self._attributes, self._changing)


class _Snapshot:
    """A state of modules, which is in force while a block runs."""

    def __init__(
        self, holders: list[nn.Module], attributes: list[Any], changing: MutableMapping[nn.Module, set[str]]
    ) -> None:
        self._changing, self._copies = changing, dict[int, _Copy]()
        self._watched: list[tuple[nn.Module, str, Tensor, int | None, bool]] = []
        self._tables = []
        for module in holders:
            table, temporary = buffers_of(module), non_persistent_buffers_of(module)
            kept = {name: self._kept(module, name, value, name not in temporary) for name, value in table.items()}
            self._tables.append((table, kept))
        self._attributes = [
            (own, {name: self._kept(module, name, own.get(name, _MISSING)) for name in names})
            for module, own, names in attributes
        ]
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def _kept(self, module: nn.Module, name: str, value: Any, is_saved: bool = False) -> Any:
        if not isinstance(value, Tensor):
            kept = {id(tensor): self._kept(module, name, tensor) for tensor in tensors_in(value)}
            return copied(value, kept)
        known = self._changing.get(module)
        is_copied = is_saved or known is None or name in known
        if not is_saved:
            self._watched.append((module, name, value, write_count(value), is_copied))
        if is_copied and id(value) not in self._copies:
            self._copies[id(value)] = _Copy(value)
        return self._copies[id(value)] if is_copied else value

    def first_run_ended(self) -> str:
        """Note the tensors that the first run changed; name one that was not copied before."""
        lost = ""
        for module, name, tensor, count, is_copied in self._watched:
            names = self._changing.setdefault(module, set())
            if write_count(tensor) != count:
                names.add(name)
                lost = lost if is_copied else f"'{name}'"
            elif is_copied and name not in names:
                self._copies[id(tensor)].values = None
        self._watched.clear()
        return lost

    def __enter__(self) -> None:
        copies = dict[int, Any]()
        self._before = []
        for table, entries in self._tables:
            self._before.append((table, dict(table)))
            _refill(table, {name: copied(value, copies) for name, value in entries.items()})
        for own, entries in self._attributes:
            self._before.append((own, {name: own.get(name, _MISSING) for name in entries}))
            _set(own, {name: copied(value, copies) for name, value in entries.items()})

    def __exit__(self, *_: object) -> None:
        for table, entries in self._before[: len(self._tables)]:
            _refill(table, entries)
        for own, entries in self._before[len(self._tables) :]:
            _set(own, entries)


class _Copy:
    """The values of a tensor, in new memory for each recompute: autograd may have saved the original."""

    __slots__ = ("original", "values")

    def __init__(self, original: Tensor) -> None:
        self.original = original
        self.values: Tensor | None = original.detach().clone()  # None: the first run left the original as it was


def _refill(table: dict[str, Any], entries: dict[str, Any]) -> None:
    table.clear()
    table.update(entries)


def _set(own: dict[str, Any], entries: dict[str, Any]) -> None:
    for name, value in entries.items():
        if value is _MISSING:
            own.pop(name, None)
        else:
            own[name] = value


# -- values ---------------------------------------------------------------------------------------------------


def copied(value: Any, done: dict[int, Any]) -> Any:
    """Copy the containers and dataclasses in a value, nested ones too.

    Args:
        value: of any kind.
        done: the copies so far, by identity of their originals; tensors that are not among them stay.
    """
    kind = type(value)
    if kind in _ATOMS:
        return value
    if id(value) in done:
        return done[id(value)]
    if kind is _Copy:
        done[id(value)] = value.original if value.values is None else value.values.clone()
        return done[id(value)]
    if isinstance(value, tuple):
        parts = [copied(part, done) for part in value]
        if all(map(operator.is_, parts, value)):
            return value
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    if isinstance(value, Tensor) or not is_container(value):
        return value
    done[id(value)] = new = copy.copy(value)
    for key, part in entries_of(value):
        other = copied(part, done)
        if other is not part:
            put_entry(new, key, other)
    return new


def is_container(value: Any) -> bool:
    """Return whether a value is a container that a call may change, or a dataclass."""
    return isinstance(value, _CONTAINERS) or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def entries_of(value: Any) -> list[tuple[Any, Any]]:
    """Return the entries of a container or dataclass by key, position or name; none of a set."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, Sequence):
        return list(enumerate(value))
    if isinstance(value, Set):
        return []
    return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]


def put_entry(value: Any, key: Any, part: Any) -> None:
    """Set an entry of a container or dataclass, a frozen one too."""
    if isinstance(value, (MutableMapping, MutableSequence)):
        value[key] = part
    else:
        object.__setattr__(value, key, part)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a value, those in its containers too."""
    if isinstance(value, Tensor):
        return [value]
    if type(value) in _ATOMS or not (isinstance(value, tuple) or is_container(value)):
        return []
    parts = value if isinstance(value, tuple) else [part for _, part in entries_of(value)]
    return [tensor for part in parts for tensor in tensors_in(part)]


def _refuse_cache(path: str, value: Any) -> None:
    """Refuse a key-value cache: a second run would change it again."""
    if hasattr(value, "get_seq_length") and hasattr(value, "update"):
        raise InputError(
            f"checkpoint at '{path}': the inputs contain a {type(value).__name__}, which the recompute would fill "
            "again",
            path=path,
            hint="call the model with use_cache=False while training (or set model.config.use_cache = False)",
        )


# -- what code assigns ----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _names(cls: Any) -> tuple[frozenset[str], frozenset[str]]:
    """Return the attributes that a class's methods assign, and all names in them.

    Constructors are left out, and so are the classes of torch, which keep their state in buffers.
    """
    members = [
        member
        for base in cls.__mro__
        if base is not object and not base.__module__.startswith("torch.")
        for name, member in vars(base).items()
        if name != "__init__"
    ]
    return _names_in(members, cls.__module__)


def _names_in(members: list[Any], module: str) -> tuple[frozenset[str], frozenset[str]]:
    """Search functions, their wrapped functions, and functions of ``module`` named in them."""
    written, read, seen, left = set[str](), set[str](), set[CodeType](), list(members)
    while left:
        member = left.pop()
        if isinstance(member, property):
            left += [member.fget, member.fset]
        elif isinstance(member, (staticmethod, classmethod, MethodType)):
            left.append(member.__func__)
        elif isinstance(member, functools.partial):
            left.append(member.func)
        elif isinstance(member, FunctionType) and member.__code__ not in seen:
            left.append(getattr(member, "__wrapped__", None))
            left += [cell.cell_contents for cell in member.__closure__ or () if _is_filled(cell)]
            for code in _codes(member.__code__):
                seen.add(code)
                read.update(code.co_names)
                written.update(each.argval for each in dis.get_instructions(code) if each.opname == "STORE_ATTR")
                if not {"setattr", "__dict__", "vars"}.isdisjoint(code.co_names):
                    written.update(each for each in code.co_consts if isinstance(each, str) and each.isidentifier())
                named = [member.__globals__.get(name) for name in code.co_names]
                left += [each for each in named if getattr(each, "__module__", None) == module]
    return frozenset(written), frozenset(read | written)


def _is_filled(cell: Any) -> bool:
    try:
        return isinstance(cell.cell_contents, (FunctionType, MethodType, functools.partial))
    except ValueError:
        return False


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
