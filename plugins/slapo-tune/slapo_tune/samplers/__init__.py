"""The base class of samplers, what they are given - a search space and the trials so far - and those of slapo-tune."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

STATUSES = ("ok", "oom", "timeout", "crash", "wrong", "refused", "over_memory")
"""How a trial can end. ``refused`` (a step, or the space, refuses the point) and ``over_memory`` (the estimate says
that it does not fit) are never started."""

Point = Mapping[str, Any]
"""One choice for each symbol of the space, in the order in which they were chosen."""


@dataclass(frozen=True)
class Trial:
    """A point that was tried, or pruned.

    Args:
        number: from 0, in the order of the proposals.
        point: the choices.
        status: one of :data:`STATUSES`.
        value: the objective, e.g. samples per second; None unless the status is ``"ok"``.
        reason: why it was not ``"ok"``; empty otherwise.
        predicted: by the estimate: ``{"memory": bytes, "time": seconds}``, or a part of it.
        measured: by the trial: ``{"memory": bytes, "time": seconds, ...}``.
        seconds: how long it took.
    """

    number: int
    point: Point
    status: str
    value: float | None = None
    reason: str = ""
    predicted: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0


class SearchSpace(Protocol):
    """The interface of a search space for samplers.

    Values are plain data: None, booleans, numbers, strings, tuples of these. Points that are equal are the same point.
    """

    def points(self) -> Iterable[Point]:
        """Every point that the space allows, in the order of its candidates; the same at every call.

        They are made one after the other, and there may be millions: take as many as needed.
        """

    def draw(self, pick: Callable[[str, tuple[Any, ...]], int]) -> Point | None:
        """The point of one run of the user's function, which chooses symbol by symbol.

        Args:
            pick: is given a symbol's name and its candidates, in their natural order, and gives the index of one.

        Returns:
            the point; None if the space refuses the choices.
        """

    def predicted_memory(self, point: Point) -> int | None:
        """Bytes that the estimate says the fullest rank needs; None where nothing is estimated, e.g. since a step is
        refused at this point. Takes seconds at first, and nothing when asked again.
        """

    @property
    def memory(self) -> int | None:
        """The limit of a rank's memory in bytes; None for none."""


class Sampler(ABC):
    """Proposes points; published by an entry point of the group ``slapo.v1.samplers``.

    A sampler keeps nothing: what it proposes is a function of its arguments alone, so that a search that was killed
    goes on where it was. Its class takes no arguments. ``slapo plugins check`` holds it to that.

    Attributes:
        name: what ``tune(sampler=...)`` calls it, e.g. ``"coordinate"``.
    """

    name: ClassVar[str]

    @abstractmethod
    def suggest(self, space: SearchSpace, history: Sequence[Trial], seed: int) -> Point | None:
        """The point to try next.

        Args:
            space: what may be chosen.
            history: all trials so far, oldest first, the pruned ones and those that failed among them.
            seed: of the search.

        Returns:
            a point of the space that the history does not have; None to end the search.
        """
