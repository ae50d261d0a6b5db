"""`Space`: the tree of all choices, walked by running the function again for each leaf."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from slapo_tune.space.symbols import RefusedError

__all__ = ["Space"]


class _Replay:
    """One run: the choices of ``prefix``, then always the first candidate."""

    def __init__(self, prefix: list[int]) -> None:
        self.taken = list(prefix)
        self.counts: list[int] = []
        self.point: dict[str, Any] = {}
        self.reason = ""

    def choose(self, name: str, candidates: Iterable[Any]) -> Any:
        values = list(candidates)
        depth = len(self.counts)
        if depth == len(self.taken):
            self.taken.append(0)
        self.counts.append(len(values))
        self.point[name] = values[self.taken[depth]]
        return self.point[name]

    def require(self, condition: bool, reason: str) -> None:
        if not condition:
            self.reason = reason
            raise RefusedError


class Space:
    """Everything that a space function allows.

    Args:
        function: the user's.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self._leaves: list[_Replay] | None = None

    def points(self) -> list[dict[str, Any]]:
        """Every point, in the order of the candidates."""
        return [leaf.point for leaf in self._walked() if not leaf.reason]

    def refused(self) -> list[tuple[dict[str, Any], str]]:
        """Choices that ``require`` refused, and why."""
        return [(leaf.point, leaf.reason) for leaf in self._walked() if leaf.reason]

    def _walked(self) -> list[_Replay]:
        if self._leaves is None:
            self._leaves = list(self._walk())
        return self._leaves

    def _walk(self) -> Iterator[_Replay]:
        prefix: list[int] | None = []
        while prefix is not None:
            run = _Replay(prefix)
            with contextlib.suppress(RefusedError):
                self._function(run)
            yield run
            prefix = _next(run)


def _next(run: _Replay) -> list[int] | None:
    taken = run.taken[: len(run.counts)]
    while taken:
        last = taken.pop()
        if last + 1 < run.counts[len(taken)]:
            return [*taken, last + 1]
    return None
