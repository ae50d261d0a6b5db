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
        """The modules of which a copy, made now, would not be a copy of the reference ones."""
        return ()

    @abstractmethod
    def describe(self) -> str:
        """What changed, for ``explain``: ``"weight (3072, 768) -> (1536, 768), tp: S(0)"``."""


def name_of(function: Callable[..., Any]) -> str:
    """A function's name for people: ``"checkpointed"``, also of a ``functools.partial``."""
    function = getattr(function, "func", function)  # functools.partial
    name: str = getattr(function, "__qualname__", None) or type(function).__qualname__
    return name.replace(".<locals>", "")
