"""`Symbols`: what a space function is given; each run of it makes one point."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

__all__ = ["RefusedError", "Symbols"]


class RefusedError(Exception):
    """``require`` refused the point; never seen by users."""


class Symbols(Protocol):
    """The choices of one point, made in order: later candidates may depend on earlier choices."""

    def choose(self, name: str, candidates: Iterable[Any]) -> Any:
        """One of the candidates: plain data (numbers, strings, booleans, None, tuples of these).

        Args:
            name: of the symbol, the same for each run of the function.
            candidates: in their natural order, e.g. from small to large.
        """

    def require(self, condition: bool, reason: str) -> None:
        """Refuse the point unless ``condition`` holds.

        Args:
            condition: of the choices so far.
            reason: what must hold, in words; shown in the report.
        """


def names_of(choices: Sequence[tuple[str, Any]]) -> tuple[str, ...]:
    """The symbols of a path of choices."""
    return tuple(name for name, _ in choices)
