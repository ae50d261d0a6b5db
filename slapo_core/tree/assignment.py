"""Exactly undoable changes: a set attribute, a removed hook, moved hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from slapo_core.private import (
    HOOK_TABLES,
    STATE_DICT_HOOK_TABLES,
    TENSOR_HOOK_TABLES,
    buffers_of,
    full_backward_flag,
    function_of_hook,
    hooks_of,
    parameters_of,
    pass_module,
    set_full_backward_flag,
)

MISSING: Any = object()


class Assignment:
    """``setattr(module, name, value)`` that can be undone.

    ``nn.LSTM`` keeps further references to its parameters, and a module may define properties or count
    its assignments. What one assignment changed in ``module.__dict__``, and in the lists and dictionaries in it, is
    noted; undoing takes back that and nothing else.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        self._changes: list[_Change] = []

    def present(self) -> Any:
        """Return the present value."""
        return getattr(self.module, self.name, None)

    def set(self, value: Any) -> None:
        cls = type(self.module)
        plain = cls.__setattr__ is nn.Module.__setattr__ and not hasattr(cls, self.name)
        before = _contents(self.module, plain=plain)
        try:
            setattr(self.module, self.name, value)
        finally:  # also when __setattr__ raised halfway
            self._changes = _changes(before, _contents(self.module, plain=plain))

    def undo(self) -> None:
        for change in self._changes:
            change.undo()
        self._changes = []


class _Change:
    """One slot of a dictionary, or the contents of a list."""

    def __init__(self, container: Any, key: Any, old: Any) -> None:
        self.container, self.key, self.old = container, key, old

    def undo(self) -> None:
        if isinstance(self.container, list):
            self.container[:] = self.old
        elif self.old is MISSING:
            self.container.pop(self.key, None)
        else:
            self.container[self.key] = self.old


_Contents = list[tuple[Any, Any]]  # (container, shallow copy)


def _contents(module: nn.Module, *, plain: bool) -> _Contents:
    own = module.__dict__
    if plain:  # torch's own __setattr__ writes to these only
        return [(container, dict(container)) for container in (own, parameters_of(module), buffers_of(module))]
    inner = [value for value in own.values() if isinstance(value, (dict, list))]
    return [
        (container, list(container) if isinstance(container, list) else dict(container)) for container in (own, *inner)
    ]


def _changes(before: _Contents, after: _Contents) -> list[_Change]:
    found: list[_Change] = []
    now: dict[int, Any] = {id(container): copied for container, copied in after}
    for container, old in before:
        new: Any = now.get(id(container), container)
        if isinstance(old, list):
            if len(old) != len(new) or any(a is not b for a, b in zip(old, new, strict=True)):
                found.append(_Change(container, None, old))
            continue
        found += [_Change(container, key, MISSING) for key in new if key not in old]
        found += [_Change(container, key, value) for key, value in old.items() if new.get(key, MISSING) is not value]
    return found


def gradient_hooks(tensor: torch.Tensor | None, *, but: torch.Tensor | None = None) -> tuple[str, ...]:
    """Return how the hooks of a tensor were registered: ``("register_hook",)``; empty if it has none.

    Args:
        tensor: a parameter or a buffer.
        but: hooks that this one has too do not count.
    """
    return tuple(
        method
        for table, method in TENSOR_HOOK_TABLES.items()
        if getattr(tensor, table, None) and getattr(tensor, table) is not getattr(but, table, None)
    )


class GradientHooks:
    """Moves the hooks of ``old`` to ``new``, which replaces it.

    The very same dictionaries, so that the handles that the user got still remove them; only where the new tensor has
    hooks of its own, it gets a dictionary of both.
    """

    def __init__(self, old: torch.Tensor | None, new: torch.Tensor | None) -> None:
        self.old, self.new = old, new
        self._before: dict[str, Any] = {}

    def carry(self) -> None:
        if self.old is None or self.new is None or self.old is self.new:
            return
        for table in TENSOR_HOOK_TABLES:
            hooks, own = getattr(self.old, table), getattr(self.new, table)
            if hooks and own is not hooks:
                self._before[table] = own
                setattr(self.new, table, hooks if not own else type(hooks)({**own, **hooks}))

    def take_back(self) -> None:
        for table, own in self._before.items():
            setattr(self.new, table, own)
        self._before.clear()


def hooks_of_user(registered: Sequence[Callable[..., Any]], of_steps: Sequence[Callable[..., Any]]) -> list[Any]:
    """Return the registered hooks without the steps' own, each of which counts once."""
    left = list(of_steps)
    found = []
    for hook in registered:
        position = next((index for index, other in enumerate(left) if other is hook), None)
        if position is None:
            found.append(hook)
        else:
            del left[position]
    return found


class TakenHook:
    """A hook removed from one of torch's ordered dictionaries, and its neighbors."""

    def __init__(self, hooks: dict[int, Any], identity: int) -> None:
        order = list(hooks)
        place = order.index(identity)
        self.before, self.after = order[:place], order[place + 1 :]
        self.identity, self.value = identity, hooks.pop(identity)

    def put_back(self, hooks: dict[int, Any]) -> None:
        """Insert it behind the last of those that were before it; others stay as they are."""
        order = list(hooks)
        ahead = [position for position, identity in enumerate(order) if identity in self.before]
        behind = [position for position, identity in enumerate(order) if identity in self.after]
        place = ahead[-1] + 1 if ahead else behind[0] if behind else len(order)
        items = list(hooks.items())
        items.insert(place, (self.identity, self.value))
        hooks.clear()
        hooks.update(items)


_HOOK_TABLES = (*(table for tables in HOOK_TABLES.values() for table in tables), *STATE_DICT_HOOK_TABLES)


class ModuleHooks:
    """Moves the hooks of module ``old`` to ``new``, which replaces it.

    The very same tables, so that handles still remove, and options, order and functions stay; hooks registered or
    removed meanwhile are so after :meth:`take_back` too. Hooks of the new module's own run first. State-dict hooks
    that are methods of the old module, or that the new one registered too, stay with the old one.
    """

    def __init__(self, old: nn.Module, new: nn.Module) -> None:
        self.old, self.new = old, new
        self._own: dict[str, list[int]] | None = None  # the new module's, by table; None: nothing is moved
        self._left: list[tuple[dict[int, Any], TakenHook]] = []
        self._flags: tuple[bool | None, bool | None] = (None, None)

    def carry(self) -> None:
        self._flags = full_backward_flag(self.old), full_backward_flag(self.new)
        self._own = {}
        for table in _HOOK_TABLES:
            own, hooks = self._exchange(table)
            self._own[table] = list(own)
            if table in STATE_DICT_HOOK_TABLES:
                known = [function_of_hook(hook) for hook in own.values()]
                left = [number for number, hook in hooks.items() if self._stays(function_of_hook(hook), known)]
                self._left += [(hooks, TakenHook(hooks, number)) for number in left]
                for hook in hooks.values():
                    pass_module(hook, self.old, self.new)
            if own:
                joined = {**own, **hooks}
                hooks.clear()
                hooks.update(joined)
        if self._flags[0] is not None:
            set_full_backward_flag(self.new, self._flags[0])

    def take_back(self) -> bool:
        """Give the hooks back; return whether they had been moved."""
        if self._own is None:
            return False
        for table, numbers in self._own.items():
            hooks, _ = self._exchange(table)
            for number in numbers:
                hooks.pop(number, None)
            for hook in hooks.values() if table in STATE_DICT_HOOK_TABLES else ():
                pass_module(hook, self.new, self.old)
        for hooks, taken in reversed(self._left):
            taken.put_back(hooks)
        before, own = self._flags
        set_full_backward_flag(
            self.old, full_backward_flag(self.new) if hooks_of(self.old)["full_backward"] else before
        )
        set_full_backward_flag(self.new, own)
        self._own, self._left = None, []
        return True

    def _exchange(self, table: str) -> tuple[dict[int, Any], dict[int, Any]]:
        """Exchange a table of the two modules; return the one that each has then."""
        old, new = self.old.__dict__, self.new.__dict__
        old[table], new[table] = new[table], old[table]
        return old[table], new[table]

    def _stays(self, hook: Any, known: list[Any]) -> bool:
        function = hook.func if isinstance(hook, functools.partial) else hook
        return getattr(function, "__self__", None) is self.old or any(hook == one for one in known)
