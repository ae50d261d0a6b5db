"""`Run`: what ``evaluate`` is given on each rank of a trial."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_core.spec.sampler import Point
    from slapo_tune.study import Study

__all__ = ["Run"]


@dataclass
class Run:
    """One rank of one trial.

    Args:
        study: what is searched.
        point: what is tried.
        schedule: of the study's model, with the point's steps applied; on the meta device until it is built.
        rank: the global rank.
        measured: what the log is told beside the value: names and numbers.
    """

    study: Study
    point: Point
    schedule: Schedule
    rank: int
    measured: dict[str, Any] = field(default_factory=dict)
