"""The oracle of `fit`: estimates of a schedule with further modules checkpointed, none of them made twice."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slapo_core.estimation.estimating import estimate_source
from slapo_core.estimation.fitting.watching import Profile, WatchUnits
from slapo_core.estimation.results import Estimate
from slapo_core.estimation.sending import require_sendable, sendable_batch
from slapo_core.estimation.source import Source, of_schedule
from slapo_core.primitives.checkpoint import Checkpoint

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule

__all__ = ["Checkpointed", "Oracle"]


@dataclass(frozen=True)
class Checkpointed:
    """A source of which further modules are checkpointed.

    Args:
        source: of the schedule.
        paths: of the modules.
    """

    source: Source
    paths: tuple[str, ...]

    def schedule(self, mesh: Mapping[str, int] | None, example_inputs: Any) -> Schedule:
        """As :meth:`Source.schedule`, and the steps."""
        schedule = self.source.schedule(mesh, example_inputs)
        for path in self.paths:
            schedule.apply_at(schedule.tree.node(path), Checkpoint(), location="fit")
        return schedule


class Oracle:
    """Asks for estimates; answers are kept with the schedule, by its steps and all that was asked.

    Args:
        schedule: as it is now.
        batch: as for :func:`slapo_core.estimate`.
        units: what may be checkpointed.
        arguments: of :func:`slapo_core.estimate`.

    Attributes:
        played: how many kinds of ranks were played.
    """

    def __init__(self, schedule: Schedule, batch: Any, units: tuple[str, ...], arguments: Mapping[str, Any]) -> None:
        self._source = of_schedule(schedule)
        self._batch, self._units, self._arguments = sendable_batch(batch), units, dict(arguments)
        self._known: dict[bytes, Estimate] = schedule.estimates
        about = {name: value for name, value in self._arguments.items() if name != "timeout"}
        for name, value in about.items():
            require_sendable(name, value, f"{name}=functools.partial(...)")
        self._key = pickle.dumps((self._source, self._batch, units, about))
        self.played = 0

    def of(self, paths: tuple[str, ...]) -> Estimate:
        """With those of the units checkpointed."""
        key = hashlib.sha256(self._key + pickle.dumps(paths)).digest()
        if key not in self._known:
            watched = WatchUnits(self._units) if len(paths) in (0, len(self._units)) else None
            source = Checkpointed(self._source, paths)
            self._known[key] = estimate_source(source, self._batch, observer=watched, **self._arguments)
            self.played += len(self._known[key].kinds)
        return self._known[key]

    def profiles(self, paths: tuple[str, ...]) -> tuple[Profile, ...]:
        """What was seen of each kind of rank, with none or all of the units checkpointed."""
        return tuple(kind.observed for kind in self.of(paths).kinds)
