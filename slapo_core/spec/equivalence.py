"""How close a scheduled model must stay to the reference model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import ClassVar

__all__ = ["Equivalence"]


class _Level(IntEnum):
    EXACT = 0
    REORDERED = 1
    APPROXIMATE = 2
    RANDOM = 3


@dataclass(frozen=True)
class Equivalence:
    """What a primitive promises about the numbers of the model it changes.

    ``Equivalence.EXACT``
        The same operations in the same order: the same bits.
    ``Equivalence.REORDERED``
        The same real-number function; floating-point sums are associated differently.
    ``Equivalence.RANDOM``
        The same distribution; random numbers (dropout) come from another stream, so that ``verify`` compares numbers
        without dropout only. Every module still drops as often, and with the same probability, as in the reference
        model, and nothing in evaluation; within a step forward and backward still use the same numbers.
    ``Equivalence.APPROXIMATE(rtol, atol)``
        Another function, within the stated tolerances (quantization, a fast kernel).

    A promise that holds only under a condition says so: ``Equivalence.EXACT.provided("the module draws no random
    numbers")``. ``verify`` holds the step to it all the same, and so finds a model for which the condition fails.

    Args:
        level: one of the four, ordered from the strictest to the loosest.
        rtol: for APPROXIMATE, the difference allowed relative to the largest element of the reference tensor.
        atol: for APPROXIMATE, the absolute difference allowed.
        conditions: what must be so for the promise to hold, e.g. ``("the module draws no random numbers",)``.
    """

    level: _Level
    rtol: float = 0.0
    atol: float = 0.0
    conditions: tuple[str, ...] = ()

    EXACT: ClassVar[Equivalence]
    REORDERED: ClassVar[Equivalence]
    RANDOM: ClassVar[Equivalence]

    @classmethod
    def APPROXIMATE(cls, rtol: float, atol: float = 0.0) -> Equivalence:
        """Another function that stays within ``rtol`` (relative) and ``atol`` (absolute)."""
        if rtol < 0 or atol < 0:
            raise ValueError(f"rtol and atol must not be negative (got rtol={rtol}, atol={atol})")
        return cls(_Level.APPROXIMATE, rtol, atol)

    @classmethod
    def weakest(cls, promises: Iterable[Equivalence]) -> Equivalence:
        """The promise that remains after all of ``promises`` were made one after another."""
        level, rtol, atol = _Level.EXACT, 0.0, 0.0
        conditions: list[str] = []
        for promise in promises:
            level = max(level, promise.level)
            rtol += promise.rtol
            atol += promise.atol
            conditions += promise.conditions
        return cls(level, rtol, atol, tuple(dict.fromkeys(conditions)))

    def provided(self, condition: str) -> Equivalence:
        """The same promise, made only under one more condition."""
        return replace(self, conditions=(*self.conditions, condition))

    @property
    def is_exact(self) -> bool:
        """Whether the same bits are promised."""
        return self.level is _Level.EXACT

    @property
    def is_random(self) -> bool:
        """Whether random numbers may come from another stream."""
        return self.level is _Level.RANDOM

    def __str__(self) -> str:
        name = self.level.name
        name += f"(rtol={self.rtol:g}, atol={self.atol:g})" if self.rtol or self.atol else ""
        return f"{name} provided {' and '.join(self.conditions)}" if self.conditions else name


Equivalence.EXACT = Equivalence(_Level.EXACT)
Equivalence.REORDERED = Equivalence(_Level.REORDERED)
Equivalence.RANDOM = Equivalence(_Level.RANDOM)
