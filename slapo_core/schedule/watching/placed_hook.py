"""A hook of a module that comes and goes: each time under the same number, and between the same other hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from slapo_core.tree.journal.calls import TakenHook

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

__all__ = ["PlacedHook"]


class PlacedHook:
    """Made without effect; see :meth:`put`.

    Args:
        model: which gets it.
        tables: the model's dictionaries that registering writes to.
        register: registers it for the first time.
    """

    def __init__(self, model: nn.Module, tables: tuple[str, ...], register: Callable[[], RemovableHandle]) -> None:
        self._model, self._tables, self._register = model, tables, register
        self._id: int | None = None
        self._taken: dict[str, TakenHook] | None = None

    def put(self) -> None:
        """Have it in place."""
        if self._id is None:
            self._id = self._register().id
        elif self._taken is not None:
            for table, taken in self._taken.items():
                taken.put_back(getattr(self._model, table))
            self._taken = None

    def take(self) -> None:
        """Have it away."""
        if self._id is not None and self._taken is None:
            tables = {name: getattr(self._model, name) for name in self._tables}
            self._taken = {name: TakenHook(hooks, self._id) for name, hooks in tables.items() if self._id in hooks}
