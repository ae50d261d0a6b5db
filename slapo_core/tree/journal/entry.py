"""`Entry`: one change of the model, able to undo and redo itself exactly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


class Entry(ABC):
    """One change. ``redo`` after ``undo`` gives back the very same objects; both are safe after a partial redo."""

    @abstractmethod
    def redo(self) -> None: ...

    @abstractmethod
    def undo(self) -> None: ...

    @property
    def changed(self) -> tuple[nn.Module, ...]:
        """The modules that differ from those of the reference model."""
        return ()

    @abstractmethod
    def describe(self) -> str:
        """Describe the change, for ``explain``: ``"weight (3072, 768) -> (1536, 768), tp: S(0)"``."""


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's readable name: ``"checkpointed"``, also of a ``functools.partial``."""
    function = getattr(function, "func", function)  # functools.partial
    name: str = getattr(function, "__qualname__", None) or type(function).__qualname__
    return name.replace(".<locals>", "")
