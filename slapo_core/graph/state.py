"""A recording is no call of the model: what it sets on modules, and in what they hold, is taken back."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from slapo_core.graph.leaves import walk

__all__ = ["state_kept"]

_CONTAINERS = (list, dict, set)
_NO_HOLDERS = (nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType, types.MethodType)
_REGISTERED = ("_parameters", "_buffers", "_modules")


@contextlib.contextmanager
def state_kept(
    root: nn.Module, recorded: Collection[nn.Module] = (), refuse: Callable[[str], Exception] | None = None
) -> Iterator[None]:
    """Put back, at the end, what was changed meanwhile: attributes, and lists, dictionaries and objects in them.

    Args:
        root: the modules below it too.
        recorded: modules whose own code becomes the graph, which does not do such things again.
        refuse: makes the error for a change in one of those; None lets it pass.
    """
    inlined = {id(module) for module in recorded}
    holders: dict[int, tuple[str, Any, Any, bool]] = {}
    empty: tuple[list[Any], list[Any]] = ([], [])  # in modules that stay calls, and in recorded ones
    for path, module in walk(root):
        _note(module.__dict__, f"self.{path}" if path else "self", id(module) in inlined, holders, empty)
    completed = False
    try:
        yield
        completed = True
    finally:
        changed = [name for name, value, before, own in holders.values() if not _restore(value, before) and own]
        filled = [container for container in empty[True] if container]
        for container in (*empty[False], *filled):
            container.clear()
    if completed and refuse is not None:
        names = [*changed, *(_name_of(root, container) for container in filled)]
        if names:
            raise refuse(f"changes {names[0]} in place, which a graph would not do again")


def _note(
    attributes: dict[str, Any],
    name: str,
    is_recorded: bool,
    holders: dict[int, Any],
    empty: tuple[list[Any], list[Any]],
) -> None:
    """What is in ``attributes``, and in what they hold; what is empty in ``empty``, which costs next to nothing."""
    if id(attributes) in holders:
        return
    holders[id(attributes)] = (name, attributes, dict(attributes), is_recorded)
    for key, value in attributes.items():
        if isinstance(value, _CONTAINERS):
            if value:
                _note_container(value, _below(name, key), is_recorded, holders, empty)
            else:
                empty[is_recorded].append(value)
        elif hasattr(value, "__dict__") and not isinstance(value, _NO_HOLDERS) and type(value.__dict__) is dict:
            _note(value.__dict__, _below(name, key), is_recorded, holders, empty)


def _note_container(
    value: Any, name: str, is_recorded: bool, holders: dict[int, Any], empty: tuple[list[Any], list[Any]]
) -> None:
    if id(value) in holders:
        return
    before = dict(value) if isinstance(value, dict) else value.copy()  # a class of its own may not be made so
    holders[id(value)] = (name, value, before, is_recorded)
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, _CONTAINERS):
            if item:
                _note_container(item, name, is_recorded, holders, empty)
            else:
                empty[is_recorded].append(item)


def _below(name: str, key: str) -> str:
    return f"the {key[1:]} of {name}" if key in _REGISTERED else f"{name}.{key}"


def _name_of(root: nn.Module, container: Any) -> str:
    """What a container is called that was empty."""
    for path, module in walk(root):
        found = _name_in(module.__dict__, f"self.{path}" if path else "self", container, set())
        if found is not None:
            return found
    return "an attribute"


def _name_in(attributes: dict[str, Any], name: str, container: Any, seen: set[int]) -> str | None:
    if id(attributes) in seen:
        return None
    seen.add(id(attributes))
    for key, value in attributes.items():
        below = _below(name, key)
        if value is container or (isinstance(value, _CONTAINERS) and _holds(value, container)):
            return below
        if hasattr(value, "__dict__") and not isinstance(value, _NO_HOLDERS) and type(value.__dict__) is dict:
            found = _name_in(value.__dict__, below, container, seen)
            if found is not None:
                return found
    return None


def _holds(value: Any, container: Any) -> bool:
    for item in value.values() if isinstance(value, dict) else value:
        if item is container or (isinstance(item, _CONTAINERS) and _holds(item, container)):
            return True
    return False


def _restore(value: Any, before: Any) -> bool:
    """Make a container what it was; whether it was that already."""
    if isinstance(value, set):
        same = value == before
    elif isinstance(value, dict):
        same = len(value) == len(before) and all(
            one is other and value[one] is before[other] for one, other in zip(value, before, strict=True)
        )
    else:
        same = len(value) == len(before) and all(one is other for one, other in zip(value, before, strict=True))
    if not same:
        value.clear()
        value.extend(before) if isinstance(value, list) else value.update(before)
    return same
