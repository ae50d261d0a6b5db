"""Calls of modules that equal an earlier one of the same recording, and are not run again."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from slapo_core.internals import forwards, module_index
from slapo_graph import autocast_state
from slapo_graph.guards import fingerprint, has_full_fingerprint
from slapo_graph.private import FakeTensor, is_view, storage_id, write_count
from slapo_graph.structure import children, is_plain, rebuild, tensors_in
from slapo_graph.tracing.reads import AttributeReads, HolderPath
from slapo_graph.tracing.writer import Notes

_Reads = tuple[tuple[HolderPath, str, Any], ...]
"""What a call read of the called module and of those below: relative place, name, value."""


class RepeatedCalls:
    """Reuse the result of an earlier equal call in one recording.

    Equal calls have modules of the same structure, modes and hooks, arguments with the same metadata and sharing of
    memory, and the same values of everything that the first call read below its module. A call is not reused if it
    changed anything (an argument, a buffer, an attribute), read values, or returned memory of its arguments.

    Args:
        reads: of attributes.
        notes: which count reads of values.
        is_unchanged: whether no attribute changed since the recording began.
    """

    def __init__(self, reads: AttributeReads, notes: Notes, is_unchanged: Callable[[], bool]) -> None:
        self._reads, self._notes, self._is_unchanged = reads, notes, is_unchanged
        self._known: dict[Any, list[tuple[_Reads, forwards.ReplacedForward | None, Any]]] = {}

    def call(self, run: Callable[..., Any], path: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return the result of ``run(module, *args, **kwargs)`` on fake tensors."""
        signature = _signature((args, kwargs), {})
        if signature is None:
            return run(module, *args, **kwargs)
        around, replaced = _around(module)
        key = (
            module_index.structure(module),
            around,
            signature,
            autocast_state.state(),
            torch.is_inference_mode_enabled(),
        )
        try:
            hash(key)
        except TypeError:  # a wrapper or hook of the user
            return run(module, *args, **kwargs)
        for read, other, result in self._known.get(key, ()):
            if other is not None and not (replaced is not None and other.is_like(replaced, module)):
                continue
            if all(_is_equal(_at(module, where, name), value) for where, name, value in read):
                return _fresh_copy(result)
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
            self._known.setdefault(key, []).append((read, replaced, result))
        return result


def _around(module: nn.Module) -> tuple[Any, forwards.ReplacedForward | None]:
    """Return a module's own forward and its hooks, for comparison; and its graph, which is compared by itself."""
    own, *hooks = module_index.around(module)
    forward = module.__dict__.get("forward")
    if not isinstance(forward, forwards.ModuleForward) or forward.has_own:
        return (own, *hooks), None
    base = getattr(forward.base, "__func__", forward.base)
    graph = base if isinstance(base, forwards.ReplacedForward) else None
    return (base if graph is None else None, forward.wrappers, *hooks), graph


def _signature(value: Any, memory: dict[int, int]) -> Any:
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
    inner = None if parts is None else [(repr(key), _signature(part, memory)) for _, key, part in parts]
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


def _fresh_copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return made.requires_grad_().clone() if value.requires_grad else made
    return (
        value if is_plain(value) else rebuild(value, [_fresh_copy(part) for _, _, part in list(children(value) or ())])
    )


def _is_equal(found: Any, value: Any) -> bool:
    return found is value or (has_full_fingerprint(value) and fingerprint(found) == fingerprint(value))


def _at(module: nn.Module, place: HolderPath, name: str) -> Any:
    owner: Any = module
    for part in place:
        owner = getattr(owner, part, None)
    found = getattr(owner, name, None)
    return found.__func__ if isinstance(found, MethodType) and found.__self__ is owner else found
