"""Samplers: the base class, and the search space and trials that it gets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

STATUSES = ("ok", "oom", "timeout", "crash", "wrong", "refused", "over_memory")
"""Statuses of trials. ``refused`` (by a step or the space) and ``over_memory`` (by the estimate) never start."""

Point = Mapping[str, Any]
"""One choice for each symbol of the space, in order of choice."""


@dataclass(frozen=True)
class Trial:
    """A point that was tried, or pruned.

    Args:
        number: number from 0, in the order of proposals.
        point: the choices.
        status: one of :data:`STATUSES`.
        value: the objective, e.g. samples per second; None unless the status is ``"ok"``.
        reason: why it was not ``"ok"``; empty otherwise.
        predicted: numbers of the estimate: ``{"memory": bytes, "time": seconds}``; either may be missing.
        measured: numbers of the trial: ``{"memory": bytes, "time": seconds, ...}``.
        seconds: duration.
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

    Values are plain data: None, booleans, numbers, strings, tuples of these. Equal points are the same point.
    """

    def points(self) -> Iterable[Point]:
        """Yield each point of the space, in the order of candidates; equal at each call.

        Points are made lazily, and there may be millions: take as many as needed.
        """

    def draw(self, pick: Callable[[str, tuple[Any, ...]], int]) -> Point | None:
        """Return one point, chosen symbol by symbol.

        Args:
            pick: symbol and candidates, in their natural order -> index of the chosen candidate.

        Returns:
            the point; None if the space refuses the choices.
        """

    def predicted_memory(self, point: Point) -> int | None:
        """Return the estimated bytes of the fullest rank; None without an estimate.

        The first call for a point takes seconds; the result is cached.
        """

    @property
    def memory(self) -> int | None:
        """The limit of a rank's memory in bytes; None for no limit."""


class Sampler(ABC):
    """Proposes points; published by an entry point of the group ``slapo.v1.samplers``.

    A sampler keeps no state: its proposal is a function of its arguments, so that a killed search can resume. Its class
    takes no arguments. ``slapo plugins check`` checks both.

    Attributes:
        name: its name for ``tune(sampler=...)``, e.g. ``"coordinate"``.
    """

    name: ClassVar[str]

    @abstractmethod
    def suggest(self, space: SearchSpace, history: Sequence[Trial], seed: int) -> Point | None:
        """Propose the next point.

        Args:
            space: the search space.
            history: all trials so far, oldest first, with pruned and failed ones.
            seed: seed of the search.

        Returns:
            a point of the space without a trial; None to end the search.
        """
