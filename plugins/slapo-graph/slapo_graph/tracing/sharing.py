"""Recordings and calls shared by equal modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from slapo_core.internals import module_index
from slapo_graph import autocast_state
from slapo_graph.arguments import MISSING
from slapo_graph.guards import Checks, fingerprint, is_told
from slapo_graph.private import FakeTensor, is_view, storage_id, write_count
from slapo_graph.protocol import Flag, Recorded
from slapo_graph.specialization import Specialization
from slapo_graph.tracing.reads import AttributeReads, Place
from slapo_graph.tracing.recording import Notes
from slapo_graph.tracing.structure import children, is_plain, rebuild, tensors_in

# Recordings that serve several modules: those that are proved to be recorded alike.


class Pool:
    """Pool the recordings of several traced modules.

    One serves another module if both have the same structure, and every attribute that was read while it was recorded,
    by modules that stay calls too, is equal there: then the run that recorded it would have been the same run.
    """

    def __init__(self) -> None:
        self._entries: dict[Any, list[tuple[Checks, Specialization | None]]] = {}

    def find(self, key: Any, module: nn.Module) -> Specialization | None:
        """A variant for ``module``; ``key`` is what it was added under."""
        return next((found for found in self._alike(key, module) if found is not None), None)

    def fails(self, key: Any, module: nn.Module) -> bool:
        """Return whether an equal module could not be recorded."""
        return None in self._alike(key, module)

    def _alike(self, key: Any, module: nn.Module) -> Iterator[Specialization | None]:
        modules = [below for _, below in module_index.walk(module)]
        return (found for read, found in self._entries.get(key, ()) if read.violated(modules) is None)

    def add(self, key: Any, module: nn.Module, variant: Specialization) -> None:
        """Remember a variant if equality of others can be proved."""
        recorded = variant.recorded
        if recorded.read is not None and is_pure(recorded):
            self._add(key, module, (*recorded.read, *variant.surroundings), variant)

    def add_failure(self, key: Any, module: nn.Module, read: tuple[Flag, ...]) -> None:
        """Remember that ``module`` cannot be recorded; ``read`` is what was read until it failed."""
        self._add(key, module, read, None)

    def _add(self, key: Any, module: nn.Module, read: tuple[Flag, ...], variant: Specialization | None) -> None:
        index = {path: number for number, (path, _) in enumerate(module_index.walk(module))}
        self._entries.setdefault(key, []).append((Checks(read, index), variant))

    def __getstate__(self) -> dict[str, Any]:
        """Drop the recordings: graphs are recorded again after unpickling."""
        return {"_entries": {}}


def exact_form(value: Any) -> Any:
    """Return an argument's signature with its sizes."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.storage_offset(), value.device, value.requires_grad, value.is_leaf)
    if value is MISSING or isinstance(value, int | float):
        return value
    parts = children(value)
    return None if parts is None else tuple(exact_form(part) for _, _, part in parts)


def is_pure(recorded: Recorded) -> bool:
    """Return whether a graph holds no object of its module."""
    if recorded.captured:
        return False
    constants: list[Any] = []
    for node in recorded.graph.nodes:
        map_aggregate((node.args, node.kwargs), constants.append)
    return all(isinstance(constant, fx.Node) or is_plain(constant) for constant in constants)


# Calls of modules that are the same run as an earlier one in the same recording: they are not run again.

_Reads = tuple[tuple[Place, str, Any], ...]
"""What a call read of the called module and of those below: relative place, name, value."""


class RepeatedCalls:
    """Reuse the result of an earlier equal call in one recording.

    The modules have the same structure, modes and hooks, the arguments have the same metadata and share memory alike,
    and whatever the first run read below its module is the same in the other. A call that changed anything (an
    argument, a buffer, an attribute), looked into values or gave what shares memory with its arguments stands for no
    other.

    Args:
        reads: which attributes are read.
        notes: whether values are read.
        is_unchanged: whether no attribute changed since the recording began.
    """

    def __init__(self, reads: AttributeReads, notes: Notes, is_unchanged: Callable[[], bool]) -> None:
        self._reads, self._notes, self._is_unchanged = reads, notes, is_unchanged
        self._known: dict[Any, list[tuple[_Reads, Any]]] = {}

    def call(self, run: Callable[..., Any], path: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return the result of ``run(module, *args, **kwargs)`` on fake tensors."""
        form = _form((args, kwargs), {})
        if form is None:
            return run(module, *args, **kwargs)
        key = (
            module_index.structure(module),
            module_index.around(module),
            form,
            autocast_state.state(),
            torch.is_inference_mode_enabled(),
        )
        for read, result in self._known.get(key, ()):
            if all(_is_same(_at(module, where, name), value) for where, name, value in read):
                return _like(result)
        given = list(tensors_in((args, kwargs)))
        before = [(tensor, write_count(tensor)) for tensor in (*given, *module.buffers())]
        values_read = self._notes.value_reads
        with self._reads.logged() as log:
            result = run(module, *args, **kwargs)
        is_stateless = (
            values_read == self._notes.value_reads
            and all(write_count(tensor) == version for tensor, version in before)
            and _is_new(result, given)
            and self._is_unchanged()
        )
        if is_stateless:
            start = tuple(path.split("."))
            below = [(place[len(start) :], name) for place, name in log if place[: len(start)] == start]
            read = tuple((place, name, _at(module, place, name)) for place, name in below)
            self._known.setdefault(key, []).append((read, result))
        return result


def _form(value: Any, memory: dict[int, int]) -> Any:
    """Return an argument's complete signature, with storages numbered by ``memory``; None if unknown."""
    if isinstance(value, torch.Tensor):
        if type(value) is not FakeTensor or value.layout is not torch.strided:
            return None
        storage = memory.setdefault(storage_id(value), len(memory))
        size = (value.shape, value.stride(), value.storage_offset(), storage)
        return (torch.Tensor, *size, value.dtype, value.device, value.requires_grad, value.is_leaf, is_view(value))
    if is_plain(value):
        return (type(value), repr(value))
    parts = children(value)
    inner = None if parts is None else [(repr(key), _form(part, memory)) for _, key, part in parts]
    return None if inner is None or any(part is None for _, part in inner) else (type(value), tuple(inner))


def _is_new(result: Any, given: list[torch.Tensor]) -> bool:
    """Return whether a result holds only new tensors and plain values."""
    seen = {storage_id(tensor) for tensor in given}

    def is_new(value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            if type(value) is not FakeTensor or value.layout is not torch.strided or value.storage_offset():
                return False
            storage = storage_id(value)
            is_dense = bool(torch.ops.aten.is_non_overlapping_and_dense.default(value))
            if storage in seen or not is_dense or is_view(value) or (value.is_leaf and value.requires_grad):
                return False
            seen.add(storage)
            return True
        parts = None if is_plain(value) else children(value)
        return is_plain(value) or (parts is not None and all(is_new(part) for _, _, part in parts))

    return is_new(result)


def _like(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return made.requires_grad_().clone() if value.requires_grad else made
    return value if is_plain(value) else rebuild(value, [_like(part) for _, _, part in list(children(value) or ())])


def _is_same(found: Any, value: Any) -> bool:
    return found is value or (is_told(value) and fingerprint(found) == fingerprint(value))


def _at(module: nn.Module, place: Place, name: str) -> Any:
    owner: Any = module
    for part in place:
        owner = getattr(owner, part, None)
    found = getattr(owner, name, None)
    return found.__func__ if isinstance(found, MethodType) and found.__self__ is owner else found
