"""The base class of the ``templates`` kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

__all__ = ["Template"]


class Template(ABC):
    """A ready schedule for a family of models.

    Attributes:
        name: what users write to select it.
    """

    name: ClassVar[str]

    @abstractmethod
    def schedule(self, schedule: Any, **options: Any) -> None:
        """Apply the steps to ``schedule``.

        Args:
            schedule: a schedule of a model of this family, without steps.
            options: what the template lets its user choose.
        """
