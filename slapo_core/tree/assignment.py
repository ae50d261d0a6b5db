"""Changes that undo exactly: an attribute that was set, a hook taken out, gradient hooks that were moved."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from slapo_core.private import TENSOR_HOOK_TABLES, buffers_of, parameters_of

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
