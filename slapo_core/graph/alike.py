"""Calls of modules that are the same run as an earlier one in the same recording: they are not run again."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from slapo_core.graph import regions
from slapo_core.graph.guards import fingerprint, is_told
from slapo_core.graph.leaves import around
from slapo_core.graph.notes import Notes
from slapo_core.graph.private import FakeTensor
from slapo_core.graph.reads import AttributeReads, Place
from slapo_core.graph.sharing import structure
from slapo_core.graph.structure import children, is_plain, rebuild

__all__ = ["AlikeCalls"]

_Reads = tuple[tuple[Place, str, Any], ...]
"""What a call read of the called module and of those below: relative place, name, value."""


class AlikeCalls:
    """Gives the result of a call without running it where an earlier one was the same run: 24 layers are run once.

    The modules have the same structure, modes and hooks, the arguments have the same metadata and share memory alike,
    and whatever the first run read below its module is the same in the other. A call that changed anything (an
    argument, a buffer, an attribute), looked into values or gave what shares memory with its arguments stands for no
    other.

    Args:
        reads: which attributes are read.
        notes: whether values are read.
        is_unchanged: whether all attributes are as they were when the recording began.
    """

    def __init__(self, reads: AttributeReads, notes: Notes, is_unchanged: Callable[[], bool]) -> None:
        self._reads, self._notes, self._is_unchanged = reads, notes, is_unchanged
        self._known: dict[Any, list[tuple[_Reads, Any]]] = {}

    def call(self, run: Callable[..., Any], path: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The result of ``run(module, *args, **kwargs)``, on fake tensors; ``path`` is below the recorded module."""
        form = _form((args, kwargs), {})
        if form is None:
            return run(module, *args, **kwargs)
        key = (structure(module), around(module), form, regions.state(), torch.is_inference_mode_enabled())
        for read, result in self._known.get(key, ()):
            if all(_is_same(_at(module, where, name), value) for where, name, value in read):
                return _like(result)
        given = [tensor for tensor in _tensors((args, kwargs)) if tensor is not None]
        before = [(tensor, tensor._version) for tensor in (*given, *module.buffers())]
        values_read = self._notes.value_reads
        with self._reads.logged() as log:
            result = run(module, *args, **kwargs)
        is_stateless = (
            values_read == self._notes.value_reads
            and all(tensor._version == version for tensor, version in before)
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
    """An argument with all metadata; ``memory`` numbers storages. None: there is more to it."""
    if isinstance(value, torch.Tensor):
        if type(value) is not FakeTensor or value.layout is not torch.strided:
            return None
        storage = memory.setdefault(value.untyped_storage()._cdata, len(memory))
        size = (value.shape, value.stride(), value.storage_offset(), storage)
        return (torch.Tensor, *size, value.dtype, value.device, value.requires_grad, value.is_leaf, value._is_view())
    if is_plain(value):
        return (type(value), repr(value))
    parts = children(value)
    inner = None if parts is None else [(repr(key), _form(part, memory)) for _, key, part in parts]
    return None if inner is None or any(part is None for _, part in inner) else (type(value), tuple(inner))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = None if is_plain(value) else children(value)
    return [tensor for _, _, part in parts or () for tensor in _tensors(part)]


def _is_new(result: Any, given: list[torch.Tensor]) -> bool:
    """Whether a result is made of new tensors, each in memory of its own, and of plain values."""
    seen = {tensor.untyped_storage()._cdata for tensor in given}

    def is_new(value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            if type(value) is not FakeTensor or value.layout is not torch.strided or value.storage_offset():
                return False
            storage = value.untyped_storage()._cdata
            is_dense = bool(torch.ops.aten.is_non_overlapping_and_dense.default(value))
            if storage in seen or not is_dense or value._is_view() or (value.is_leaf and value.requires_grad):
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
