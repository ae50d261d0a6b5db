"""`Kit`: checks of ``slapo plugins check`` for kinds of other distributions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from slapo_core.plugins import Entry, Registry


class Kit(ABC):
    """The checks of one kind, published by an entry point of the group ``slapo.v1.kits``.

    Attributes:
        name: the kind, e.g. ``"samplers"``.
    """

    name: ClassVar[str]

    @abstractmethod
    def checks(self, loaded: Any, entry: Entry, registry: Registry) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield names and checks, which raise `CheckError`, or `NotApplicable` if they do not apply.

        Args:
            loaded: the object of the entry point.
            entry: the entry point.
            registry: the registry in use, which loaded the object.
        """
