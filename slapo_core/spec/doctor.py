"""What ``slapo doctor`` reports: facts about an environment, and problems with it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Fact", "Problem"]


@dataclass(frozen=True)
class Fact:
    """Something that is so, neither good nor bad.

    Args:
        what: e.g. ``"nccl"``.
        value: e.g. ``"2.27.5"``.
    """

    what: str
    value: str


@dataclass(frozen=True)
class Problem:
    """Something that is wrong.

    Args:
        message: what, with where it was found; e.g. ``"nccl was not found"``.
        hint: the command or edit that mends it, e.g. ``"pip install nvidia-nccl-cu12"``; None where there is none.
    """

    message: str
    hint: str | None = None
