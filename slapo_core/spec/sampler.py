"""The base class of the ``samplers`` kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

__all__ = ["Sampler"]


class Sampler(ABC):
    """A search strategy of the tuner.

    Attributes:
        name: what users write to select it.
    """

    name: ClassVar[str]

    @abstractmethod
    def suggest(
        self, space: Mapping[str, Sequence[Any]], history: Sequence[tuple[Mapping[str, Any], float]]
    ) -> Mapping[str, Any] | None:
        """Choose the next configuration to measure.

        Args:
            space: name -> candidate values.
            history: configurations measured so far, each with its throughput in samples per second.

        Returns:
            a configuration; None when the search is over.
        """
