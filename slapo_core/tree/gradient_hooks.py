"""Hooks that the user registered on a tensor: they go with it when another tensor of its shape takes its place."""

from __future__ import annotations

from typing import Any

import torch

_TABLES = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}


def gradient_hooks(tensor: torch.Tensor | None, *, but: torch.Tensor | None = None) -> tuple[str, ...]:
    """How the hooks of a tensor were registered: ``("register_hook",)``; empty if it has none.

    Args:
        tensor: a parameter or a buffer.
        but: hooks that this one has too do not count.
    """
    return tuple(
        method
        for table, method in _TABLES.items()
        if getattr(tensor, table, None) and getattr(tensor, table) is not getattr(but, table, None)
    )


class GradientHooks:
    """The hooks of ``old``, while ``new`` stands in its place.

    The very same dictionaries, so that the handles that the user got still remove them; only where the new tensor has
    hooks of its own, it gets a dictionary of both.
    """

    def __init__(self, old: torch.Tensor | None, new: torch.Tensor | None) -> None:
        self.old, self.new = old, new
        self._before: dict[str, Any] = {}

    def carry(self) -> None:
        if self.old is None or self.new is None or self.old is self.new:
            return
        for table in _TABLES:
            hooks, own = getattr(self.old, table), getattr(self.new, table)
            if hooks and own is not hooks:
                self._before[table] = own
                setattr(self.new, table, hooks if not own else type(hooks)({**own, **hooks}))

    def take_back(self) -> None:
        for table, own in self._before.items():
            setattr(self.new, table, own)
        self._before.clear()
