"""`Symbols`: what a space function is given; each run of it makes one point."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

__all__ = ["RefusedError", "Symbols"]


class RefusedError(Exception):
    """``require`` refused the point: ends the run of the space function; never seen by users."""


class Symbols(Protocol):
    """The choices of one point, made in order: later candidates may depend on earlier choices.

    The function is run again for each point, so it must do the same whenever it is told the same: no random numbers, no
    clock, no state. Symbols may be chosen in another order in other branches, or in some branches only.
    """

    def choose(self, name: str, candidates: Iterable[Any]) -> Any:
        """One of the candidates.

        Args:
            name: of the symbol; chosen again in the same run, it gives the same value.
            candidates: plain data (None, booleans, numbers, strings, tuples of these), in their natural order, e.g.
                from small to large: a list, a range, a generator. Where there are none, the point is refused.

        Raises:
            SpaceError: candidates that are not plain data, or twice the same; a symbol that was chosen in this run
                already, from other candidates.
        """

    def require(self, condition: bool, reason: str) -> None:
        """Refuse the point unless ``condition`` holds.

        Args:
            condition: of the choices so far.
            reason: what must hold, in words, e.g. ``"the batch divides over dp"``; shown in the report.
        """
