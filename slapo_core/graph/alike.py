"""Calls of modules that are proved to be like an earlier one in the same recording: they are not run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses import FakeTensor

from slapo_core.graph import regions
from slapo_core.graph.checks import Checks
from slapo_core.graph.leaves import walk
from slapo_core.graph.mutations import is_unchanged
from slapo_core.graph.sharing import HOOKS, structure
from slapo_core.graph.structure import children, is_plain, rebuild
from slapo_core.graph.tokens import is_transparent

if TYPE_CHECKING:
    from slapo_core.graph.flags import Flags
    from slapo_core.graph.notes import Notes
    from slapo_core.spec.tracer import Flag

__all__ = ["AlikeCalls"]

_Objects = tuple[tuple[tuple[str, ...], str, Any], ...]
"""Objects that a call read: where the attribute is, relative to the called module, its name, and the object."""


class AlikeCalls:
    """Gives the result of a call without running it, where an earlier one was the same run.

    That is proved, not guessed: both modules have the same structure, mode and hooks, the arguments have the same
    metadata and share memory alike, every attribute that the first run read is equal in the other module, and objects
    that it read are the very same. A call that changed anything - an argument, a buffer, an attribute - stands for no
    other, nor does one that looked into the values of a tensor, or whose result shares memory with what it was given;
    once an attribute was changed, none does.

    Args:
        flags: which attributes are read, and set.
        notes: whether values are read.
    """

    def __init__(self, flags: Flags, notes: Notes) -> None:
        self.flags, self.notes = flags, notes
        self._known: dict[Any, list[tuple[Checks, _Objects, Any]]] = {}
        self._is_off = False

    def call(self, path: str, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of ``run(module, *args, **kwargs)``, on fake tensors.

        Args:
            path: of the module, below the recorded one.
            module: that is called.
            run: calls it.
            args: positional arguments.
            kwargs: keyword arguments.
        """
        key = None if self._is_off else _key(module, args, kwargs)
        if key is None:
            return run(module, *args, **kwargs)
        modules = [below for _, below in walk(module)]
        for checks, objects, result in self._known.get(key, ()):
            if checks.violated(modules) is None and all(
                _at(module, where, name) is value for where, name, value in objects
            ):
                return _like(result)
        given = [part for part in _tensors((args, kwargs), []) if part is not None]
        before = [(tensor, tensor._version) for tensor in (*given, *module.buffers())]
        sets, reads = self.flags.changes, self.notes.value_reads
        result = run(module, *args, **kwargs)
        if self.flags.changes != sets or not all(is_unchanged(*pair) for pair in self.flags.containers):
            self._is_off = True
        elif reads != self.notes.value_reads:
            return result
        elif all(tensor._version == version for tensor, version in before) and _is_new(result, given, module):
            self._remember(key, path, module, result)
        return result

    def _remember(self, key: Any, path: str, module: nn.Module, result: Any) -> None:
        start = tuple(path.split("."))
        relative: list[Flag] = []
        objects = []
        for below, inner in walk(module):
            if self.flags.place_of(inner) != (*start, *(below.split(".") if below else ())):
                return  # it is known under another path: what it read was noted there
        for flag in self.flags.below(start):
            value = _at(module, flag.path, flag.attribute)
            if not is_transparent(value):
                if self.flags.place_of(value) is None and not isinstance(value, nn.Module):
                    return
                objects.append((flag.path, flag.attribute, value))
            relative.append(flag)
        index = {below: number for number, (below, _) in enumerate(walk(module))}
        entry = (Checks(relative, index), tuple(objects), result)
        self._known.setdefault(key, []).append(entry)


def _key(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """What decides about a call besides attributes; None if that cannot be said."""
    memory: dict[int, int] = {}
    form = _form((args, kwargs), memory)
    if form is None:
        return None
    own = module.__dict__
    around = (own.get("forward"), own.get("_compiled_call_impl"), *(tuple(own[table].values()) for table in HOOKS))
    key = (structure(module), around, form, regions.state(), torch.is_inference_mode_enabled())
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _form(value: Any, memory: dict[int, int]) -> Any:
    """An argument with all metadata; ``memory`` numbers storages, so that tensors share memory alike."""
    if isinstance(value, torch.Tensor):
        if type(value) is not FakeTensor:
            return None
        storage = memory.setdefault(value.untyped_storage()._cdata, len(memory))
        size = (value.shape, value.stride(), value.storage_offset(), storage)
        return (torch.Tensor, *size, value.dtype, value.device, value.requires_grad, value.is_leaf, value._is_view())
    if is_plain(value):
        return (type(value), repr(value))
    parts = children(value)
    if parts is None:
        return None
    inner = [(key, _form(part, memory)) for _, key, part in parts]
    return None if any(part is None for _, part in inner) else (type(value), tuple(inner))


def _tensors(value: Any, found: list[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif not is_plain(value):
        for _, _, part in children(value) or ():
            _tensors(part, found)
    return found


def _is_new(result: Any, given: list[torch.Tensor], module: nn.Module) -> bool:
    """Whether a result is made of new tensors in memory of their own, and of plain values."""
    storages = {tensor.untyped_storage()._cdata for tensor in given}
    seen: set[int] = set()

    def is_new(value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            if type(value) is not FakeTensor or value.storage_offset() or not _is_dense(value):
                return False
            storage = value.untyped_storage()._cdata
            if storage in storages or storage in seen or (value.is_leaf and value.requires_grad) or value._is_view():
                return False
            seen.add(storage)
            return True
        if is_plain(value):
            return True
        parts = children(value)
        return parts is not None and all(is_new(part) for _, _, part in parts)

    return is_new(result)


def _is_dense(tensor: torch.Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def _like(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return made.requires_grad_().clone() if value.requires_grad else made
    if is_plain(value):
        return value
    return rebuild(value, [_like(part) for _, _, part in list(children(value) or ())])


def _at(module: nn.Module, path: tuple[str, ...], name: str) -> Any:
    here: Any = module
    for part in (*path, name):
        here = getattr(here, part, None)
    return here
