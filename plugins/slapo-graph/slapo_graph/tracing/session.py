"""State that a recording restores or refuses to change.

Changes that a graph would not repeat are refused in recorded code, and restored after called modules.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import random
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from slapo_core.internals import module_index
from slapo_graph import private

_CONTAINERS = (list, dict, set)
_NO_HOLDERS = (
    bool, int, float, str, type(None),
    nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType, types.MethodType,
)  # fmt: skip
_Cache = type(functools.lru_cache(abs))


@contextlib.contextmanager
def without_other_modes() -> Iterator[None]:
    """Disable the active torch-function modes of other code."""
    others: list[Any] = []
    while private.number_of_function_modes():
        others.append(private.pop_function_mode())
    for each in reversed(others):
        if isinstance(each, private.DeviceContext):  # `with torch.device(...)`: it decides where tensors are made
            private.push_function_mode(each)
    torch.clear_autocast_cache()
    # On top of other hooks, e.g. torch.utils.checkpoint's, which must not count tensors that a recording saves.
    # Emptied at the end: an operation that saves its own result would keep it, and its parameters, for ever.
    boxes: list[list[torch.Tensor]] = []
    saved = torch.autograd.graph.saved_tensors_hooks(lambda tensor: _boxed(tensor, boxes), lambda box: box[0])
    try:
        with saved:
            yield
    finally:
        for box in boxes:
            box.clear()
        torch.clear_autocast_cache()  # of weights cast without values
        while private.number_of_function_modes():
            private.pop_function_mode()
        for each in reversed(others):
            private.push_function_mode(each)


def _boxed(tensor: torch.Tensor, boxes: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    boxes.append([tensor])
    return boxes[-1]


@contextlib.contextmanager
def buffers_restored(module: nn.Module) -> Iterator[None]:
    """Restore at the end the buffers written in between.

    In fake runs too: torch computes small tensors for real there, to know their values.
    """
    kept = [buffer for buffer in module.buffers() if not buffer.is_meta]
    before = [(buffer, private.write_count(buffer), buffer.detach().clone()) for buffer in kept]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, version, value in before:
                if private.write_count(buffer) != version:
                    buffer.copy_(value)


# -- random numbers and caches ----------------------------------------------------------------------------------------


def generators() -> tuple[Any, ...]:
    """Return the RNG states of Python and NumPy."""
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is None:
        return (random.getstate(),)
    kind, key, *rest = numpy.get_state()
    return random.getstate(), (kind, key.tobytes(), *rest)


@contextlib.contextmanager
def rng_restored() -> Iterator[None]:
    """Restore the RNG states of Python and NumPy."""
    numpy: Any = sys.modules.get("numpy.random")
    before, state = random.getstate(), numpy.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.set_state(state)


@contextlib.contextmanager
def caches_restored(root: nn.Module) -> Iterator[None]:
    """Clear every ``functools.lru_cache`` of the modules' code that the block filled.

    These are the caches in the classes and in their files, decorated once more or not.
    """
    caches = {id(cache): (cache, cache.cache_info().misses) for cache in _caches(root)}
    try:
        yield
    finally:
        for cache, misses in caches.values():
            if cache.cache_info().misses != misses:
                cache.cache_clear()


def _caches(root: nn.Module) -> Iterable[Any]:
    classes = {cls for module in root.modules() for cls in type(module).__mro__}
    files = {cls.__module__ for cls in classes if cls.__module__.partition(".")[0] not in ("torch", "builtins")}
    for holder in (*(sys.modules.get(name) for name in files), *(cls for cls in classes if cls.__module__ in files)):
        for value in list(vars(holder).values()) if holder is not None else ():
            value = getattr(value, "__func__", value)  # of a static method or a class method
            if isinstance(value, _Cache):
                yield value
            elif isinstance(value, types.FunctionType):
                for cell in value.__closure__ or ():
                    with contextlib.suppress(ValueError):  # an empty cell
                        if isinstance(cell.cell_contents, _Cache):
                            yield cell.cell_contents


# -- attributes and containers ----------------------------------------------------------------------------------------


def is_unchanged(container: Any, before: Any) -> bool:
    """Return whether a container holds the same objects as its copy ``before``."""
    if len(container) != len(before):
        return False
    if not before:
        return True
    if isinstance(container, set):
        return bool(container == before)
    if isinstance(container, dict) and not all(map(operator.is_, container.values(), before.values())):
        return False
    return all(map(operator.is_, container, before))


def restore(container: Any, before: Any) -> bool:
    """Restore a container from its copy; return whether it had changed."""
    if is_unchanged(container, before):
        return False
    container.clear()
    container.extend(before) if isinstance(container, list) else container.update(before)
    return True


@contextlib.contextmanager
def attributes_restored(
    root: nn.Module,
    recorded: Collection[nn.Module],
    refuse: Callable[[str], Exception],
    of_others: Collection[tuple[Any, str]] = (),
) -> Iterator[Callable[[], bool]]:
    """Restore attributes, and containers and objects in them.

    Gives a function that returns whether nothing has changed so far.

    Args:
        root: with all its submodules.
        recorded: modules whose own code becomes the graph.
        refuse: makes the error for a change in one of those.
        of_others: filled meanwhile: objects and attribute names that other threads set, which stay.
    """
    own = {id(module) for module in recorded}
    saved: dict[int, _Saved] = {}
    for path, module in module_index.walk(root):
        _save(module.__dict__, ("self", *path.split(".")) if path else ("self",), id(module) in own, saved)
    completed = False
    try:
        yield lambda: next(_changed(saved, of_others), None) is None
        completed = True
    except Exception as error:
        error.slapo_changes = _changes(_changed(saved, of_others))  # type: ignore[attr-defined]
        raise
    finally:
        changed = list(_changed(saved, of_others))
        for value, before, _, _ in changed:
            restore(value, before)
    first = next((keys for _, _, keys, is_own in changed if is_own), None)
    if completed and first is not None:
        raise refuse(f"changes {_name(first)} in place, which a graph would not do again")


_Saved = tuple[Any, Any, tuple[Any, ...], bool]
"""A container, its copy, the keys that lead to it, and whether it belongs to a recorded module."""


def _save(value: Any, keys: tuple[Any, ...], is_own: bool, saved: dict[int, _Saved]) -> None:
    """Snapshot a container, and the containers and objects in it."""
    if id(value) in saved:
        return
    before = dict(value) if isinstance(value, dict) else value.copy()  # a class of its own may not be made so
    saved[id(value)] = (value, before, keys, is_own)
    if keys[-1] in private.HOOK_TABLES:  # the contents of a hook are not the model's
        return
    for key, part in before.items() if isinstance(before, dict) else enumerate(before):
        if isinstance(part, _CONTAINERS):
            _save(part, (*keys, key), is_own, saved)
        elif not isinstance(part, _NO_HOLDERS) and type(getattr(part, "__dict__", None)) is dict:
            _save(part.__dict__, (*keys, key), is_own, saved)


def _changed(saved: dict[int, _Saved], of_others: Collection[tuple[Any, str]]) -> Iterator[_Saved]:
    for this, name in of_others:
        own = getattr(this, "__dict__", {})
        for table in (own, *(own.get(each, {}) for each in private.TABLES)):
            before = saved[id(table)][1] if id(table) in saved else {}
            if name in table:
                before[name] = table[name]
            else:
                before.pop(name, None)
    for each in saved.values():
        value, before, _, _ = each
        if (value or before) and not is_unchanged(value, before):  # most are tables of hooks, and empty
            yield each


def _changes(changed: Iterable[_Saved]) -> list[tuple[Any, dict[Any, Any]]] | None:
    """Return the tables of hooks with their new hooks; None if anything else changed, too."""
    added = []
    for value, before, keys, _ in changed:
        if keys[-1] not in private.HOOK_TABLES or list(before) != list(value)[: len(before)]:
            return None
        added.append((value, {key: hook for key, hook in value.items() if key not in before}))
    return added


def _name(keys: tuple[Any, ...]) -> str:
    name = "self"
    for key in keys[1:]:
        if key in private.TABLES:
            name = f"the {key[1:]} of {name}"
        elif isinstance(key, str) and key.isidentifier():
            name = f"{name}.{key}"
    return name
