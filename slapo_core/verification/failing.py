"""In which way a schedule fails, and whether a part of it fails in the same way."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from slapo_core.ranks.world import Failure
from slapo_core.spec.record import Record
from slapo_core.verification.values import Difference

__all__ = ["Failed", "Outcome", "Try", "alike_path"]

_SAME_SIZE = 1e-4
_MOST_NOISE = 0.05  # of a difference that is hardly larger than what is allowed


def alike_path(path: str) -> str:
    """A path with the numbers of repeated blocks left open: ``"layer.0.fc"`` gives ``"layer.*.fc"``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


@dataclass(frozen=True)
class Failed:
    """In which way a schedule fails.

    Args:
        kind: of the first difference, or the type of the exception.
        place: the tensor's name, or the line that raised; blocks of a repeated one count as the same.
        size: of the difference, or the exception's text; None where a failure has none.
        raises: whether it is an exception.
        noise: by how much the size may come out otherwise because of rounding.
    """

    kind: str
    place: str
    size: float | str | None = None
    raises: bool = False
    noise: float = 0.0

    @classmethod
    def by(cls, found: Difference) -> Failed:
        size = found.problem if math.isinf(found.largest) else found.largest
        return cls(found.kind, alike_path(found.name), size, noise=found.allowed)

    @classmethod
    def with_exception(cls, failure: Failure) -> Failed:
        return cls(failure.kind, failure.where, failure.text, raises=True)

    def is_like(self, other: Failed) -> bool:
        """Whether the same tensor differs first, or the same line raises the same exception."""
        return (self.kind, self.place, self.raises) == (other.kind, other.place, other.raises)

    def is_same(self, other: Failed) -> bool:
        """Whether the numbers are the same too: all other steps keep them, so the same mistake gives the same ones."""
        if not self.is_like(other) or self.size is None or other.size is None:
            return False
        if isinstance(self.size, str) or isinstance(other.size, str):
            return self.size == other.size
        noise = min(max(self.noise, other.noise), _MOST_NOISE * self.size)
        return math.isclose(self.size, other.size, rel_tol=_SAME_SIZE, abs_tol=noise)


Outcome = Failed | Literal["agrees", "refused"]
"""Of a trial: in which way it fails; or that it agrees with the untouched model; or that a step was refused without the
others."""

Try = Callable[[Sequence[Record]], Outcome]
"""Repeats some steps on a fresh copy; every rank must get the same answer."""
