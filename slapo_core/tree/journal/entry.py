"""`JournalEntry`: one change of a model, with exact undo and redo."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


class JournalEntry(ABC):
    """One change. ``redo`` after ``undo`` gives back the very same objects; both are safe after a partial redo.

    Attributes:
        changed: the modules that differ from the reference model.
    """

    changed: tuple[nn.Module, ...] = ()

    @abstractmethod
    def redo(self) -> None: ...

    @abstractmethod
    def undo(self) -> None: ...

    @abstractmethod
    def describe(self) -> str:
        """Describe the change, for ``explain``: ``"weight (3072, 768) -> (1536, 768), tp: S(0)"``."""
