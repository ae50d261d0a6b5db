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
        study: what is searched; its ``space`` is not here, and its ``mesh`` gives the point's.
        point: what is tried.
        schedule: of the study's model, with the point's steps applied; on the meta device until it is built.
        rank: the global rank.
        batch: the study's at this point, on ``device``; None where the study has none.
        device: where to train: ``"cpu"``, or ``"cuda:1"``.
        measured: what the log is told beside the value: names and numbers, e.g. ``{"memory": bytes}``.
    """

    study: Study
    point: Point
    schedule: Schedule
    rank: int
    batch: Any = None
    device: str = "cpu"
    measured: dict[str, Any] = field(default_factory=dict)

    def train(self) -> float:
        """What a study without ``evaluate`` does: samples per second of all replicas; fills ``measured``."""
        from slapo_tune.trials.training import train

        return train(self)
