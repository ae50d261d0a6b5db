"""What a search tells while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slapo_core.spec.sampler import Point, Trial

__all__ = ["Event", "Finished", "Note", "Started", "Verified"]


@dataclass(frozen=True)
class Started:
    """A trial is about to run.

    Args:
        number: of the trial.
        point: what is tried.
        predicted: as in :class:`slapo_core.Trial`.
    """

    number: int
    point: Point
    predicted: Mapping[str, float]


@dataclass(frozen=True)
class Finished:
    """A trial has ended, or was pruned, and the log has it.

    Args:
        trial: with its status.
    """

    trial: Trial


@dataclass(frozen=True)
class Verified:
    """The best trial was verified.

    Args:
        trial: as it was before.
        right: whether the schedule computes what the untouched model does; None where that could not be found out.
        reason: why not, or why that could not be found out.
    """

    trial: Trial
    right: bool | None
    reason: str = ""


@dataclass(frozen=True)
class Note:
    """Something that the user should know, and that ends nothing.

    Args:
        text: one sentence, e.g. that half a line at the end of the log was taken away.
    """

    text: str


Event = Started | Finished | Verified | Note
