"""What a recording assumed, checked when its code runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slapo_core.graph.location import Location

__all__ = ["Guard", "GuardViolation", "check"]


@dataclass(frozen=True)
class Guard:
    """A value that the recorded code depends on.

    Args:
        value: what was asked, e.g. ``"x.shape[1] > 4"``.
        expected: the answer while recording.
        location: of the model, where it was asked.
    """

    value: str
    expected: Any
    location: Location


class GuardViolation(Exception):  # noqa: N818 - becomes a GuardError
    """A call for which a recorded graph is not valid."""

    def __init__(self, index: int, found: Any) -> None:
        super().__init__(index, found)
        self.index, self.found = index, found


def check(value: Any, expected: Any, index: int) -> None:
    """Go on only if ``value`` is what it was while recording.

    Raises:
        GuardViolation: it is not.
    """
    if value is not expected and (type(value) is not type(expected) or value != expected):
        raise GuardViolation(index, value)
