"""`Kit`: further checks of ``slapo plugins check``, for the objects of a kind that another distribution declares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from slapo_core.plugins import Entry, Registry


class Kit(ABC):
    """The checks of one kind; published by an entry point of the group ``slapo.v1.kits`` by the owner of the kind.

    Attributes:
        name: the kind, e.g. ``"samplers"``.
    """

    name: ClassVar[str]

    @abstractmethod
    def checks(self, loaded: Any, entry: Entry, registry: Registry) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield each check by its name: it raises `CheckError`, or `NotApplicable` where there is nothing to see.

        Args:
            loaded: the object of the entry point.
            entry: its entry point.
            registry: where it was loaded from; it is the one in use.
        """
