"""The process that plays one rank: a process group without peers, tensors without memory, two real steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from slapo_core.estimation.causes import name_causes
from slapo_core.estimation.communication import CollectiveTracker, MeshGroups
from slapo_core.estimation.memory import MemoryTracker
from slapo_core.estimation.place import Place
from slapo_core.estimation.private import FakeStore, FakeTensorMode
from slapo_core.estimation.results import RankEstimate
from slapo_core.estimation.source import Source
from slapo_core.estimation.step import train
from slapo_core.estimation.tensors import fake_batch, without_memory
from slapo_core.estimation.values import Values
from slapo_core.estimation.watch import Observer
from slapo_core.spec.device import DeviceSpec

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule

__all__ = ["Request", "Trackers", "estimate_rank"]


@dataclass(frozen=True)
class Request:
    """What is asked of a process.

    Args:
        source: of the schedule.
        mesh: sizes; None for one rank without a mesh.
        rank: the global rank to play.
        ranks: those that are like it.
        batch: as ``train_step`` takes it; its tensors may be on the meta device.
        optimizer: as for ``build``.
        loss: as for ``build``.
        device: for the time.
        observer: makes one more observer, told last of every operation, whose ``result()`` comes back with the estimate.
    """

    source: Source
    mesh: Mapping[str, int] | None
    rank: int
    ranks: tuple[int, ...]
    batch: Any
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    device: DeviceSpec | None = None
    observer: Callable[[Any, Trackers], Any] | None = None


class FlopTracker:
    """Stands in until communication and flops are counted."""

    def __init__(self):
        from torch.utils.flop_counter import flop_registry

        self.total, self._registry = 0, flop_registry

    def begin(self):
        self.total = 0

    def saw(self, func, args, kwargs, result):
        count = self._registry.get(func._overloadpacket)
        if count is not None:
            self.total += count(*args, **kwargs, out_val=result)


@dataclass(frozen=True)
class Trackers:
    """All that watches the steps of a rank.

    Args:
        place: phase and module of what runs.
        memory: bytes held.
        communication: collectives.
    """

    place: Place
    memory: MemoryTracker
    communication: CollectiveTracker
    flops: FlopTracker
    others: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, schedule: Schedule, request: Request) -> Trackers:
        place = Place.of(schedule.model)
        name_causes(schedule, place)
        groups = MeshGroups(request.mesh or {}, request.rank)
        return cls(place, MemoryTracker(place), CollectiveTracker(place, groups), FlopTracker())

    def observers(self) -> tuple[Observer, ...]:
        """Who is told of every operation."""
        return (self.memory, self.communication, self.flops, *self.others)

    def spent(self) -> tuple[int, float]:
        """Floating-point operations and seconds of the step so far."""
        return self.flops.total, 0.0

    def begin_step(self) -> None:
        """The second step is what counts."""
        for observer in self.observers():
            observer.begin()

    def result(self, request: Request) -> RankEstimate:
        """What the rank's steps needed."""
        observed = next((one.result() for one in self.others), None)
        return RankEstimate(
            request.rank,
            request.ranks,
            self.memory.peak,
            self.flops.total,
            self.communication.collectives,
            observed=observed,
        )


def estimate_rank(request: Request) -> RankEstimate:
    """Play the rank; the process must have no process group."""
    world_size = math.prod(request.mesh.values()) if request.mesh else 1
    if world_size > 1:
        dist.init_process_group("fake", rank=request.rank, world_size=world_size, store=FakeStore())
    schedule = request.source.schedule(request.mesh, request.batch)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    values = Values(mode)
    without_memory(schedule, mode, values)
    trackers = Trackers.of(schedule, request)
    if request.observer is not None:
        trackers.others.append(request.observer(schedule, trackers))
    train(schedule.model, fake_batch(request.batch, mode, values), request, mode, trackers, values)
    return trackers.result(request)
