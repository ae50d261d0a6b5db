"""The process that plays one rank: a process group without peers, tensors without memory, two real steps."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from slapo_core.building.batches import micro_batches
from slapo_core.errors import SlapoError
from slapo_core.estimation.assumptions import Assumptions
from slapo_core.estimation.causes import name_causes
from slapo_core.estimation.communication import CollectiveTracker, MeshGroups
from slapo_core.estimation.faults import explained
from slapo_core.estimation.flops import FlopTracker
from slapo_core.estimation.kinds import kinds_of_ranks
from slapo_core.estimation.memory import MemoryTracker
from slapo_core.estimation.place import Place
from slapo_core.estimation.results import RankEstimate
from slapo_core.estimation.roofline import TimeTracker
from slapo_core.estimation.source import Source
from slapo_core.estimation.stages import pipeline_of, train_stages
from slapo_core.estimation.step import train
from slapo_core.estimation.tensors import fake_batch, without_memory
from slapo_core.estimation.values import Values
from slapo_core.estimation.watch import Observer
from slapo_core.private import FakeStore, FakeTensorMode, attention_of_cuda
from slapo_core.spec.device import DeviceSpec

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule

__all__ = ["Played", "Request", "Trackers", "estimate_rank", "play"]


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
        accumulate: micro-batches of a step.
        observer: makes one more observer, told last of every operation; its ``result()`` comes back with the estimate.
        config: options of target ``"torch"``, as for ``build``.
    """

    source: Source
    mesh: Mapping[str, int] | None
    rank: int
    ranks: tuple[int, ...]
    batch: Any
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    device: DeviceSpec | None = None
    accumulate: int = 1
    observer: Callable[[Schedule, Trackers], Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Played:
    """What a process tells.

    Args:
        estimate: of the rank that was played.
        kinds: the ranks of the mesh, those that are alike together.
        assumptions: what was taken for granted, in words.
        waits: of the time of each other rank along ``pp``, the share that this one waits.
    """

    estimate: RankEstimate
    kinds: tuple[tuple[int, ...], ...]
    assumptions: tuple[str, ...]
    waits: float = 0.0


@dataclass(frozen=True)
class Trackers:
    """All that watches the steps of a rank.

    Args:
        place: phase and module of what runs.
        memory: bytes held.
        communication: collectives.
        flops: of products.
        time: by the roofline; None without a device.
        others: those that the request asks for.
        without_gradients: names of parameters that got none, though replicas exchange them.
    """

    place: Place
    memory: MemoryTracker
    communication: CollectiveTracker
    flops: FlopTracker
    time: TimeTracker | None
    others: list[Any] = field(default_factory=list)
    without_gradients: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, schedule: Schedule, request: Request) -> Trackers:
        place = Place.of(schedule.model)
        name_causes(schedule, place)
        groups = MeshGroups(request.mesh or {}, request.rank)
        communication, flops = CollectiveTracker(place, groups), FlopTracker()
        time = None if request.device is None else TimeTracker(request.device, place, flops, communication)
        trackers = cls(place, MemoryTracker(place), communication, flops, time)
        if request.observer is not None:
            trackers.others.append(request.observer(schedule, trackers))
        return trackers

    def observers(self) -> tuple[Observer, ...]:
        """Who is told of every operation."""
        time = () if self.time is None else (self.time,)
        return (self.memory, self.communication, self.flops, *time, *self.others)

    def spent(self) -> tuple[int, float]:
        """Floating-point operations and seconds of the step so far."""
        return self.flops.total, 0.0 if self.time is None else self.time.seconds

    def begin_step(self) -> None:
        """The second step is what counts."""
        for observer in self.observers():
            observer.begin()

    def result(self, request: Request) -> RankEstimate:
        """What the rank's steps needed."""
        return RankEstimate(
            request.rank,
            request.ranks,
            self.memory.peak,
            self.flops.total,
            self.communication.collectives,
            None if self.time is None else self.time.seconds,
            observed=next((one.result() for one in self.others), None),
        )


def play(request: Request) -> Played | SlapoError:
    """Play the rank; the process must have no process group. What goes wrong is given back, as the user's error."""
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # it would print what is raised
    doing, model = "making the schedule", None
    try:
        world_size = math.prod(request.mesh.values()) if request.mesh else 1
        if world_size > 1:
            dist.init_process_group("fake", rank=request.rank, world_size=world_size, store=FakeStore())
        schedule = request.source.schedule(request.mesh, request.batch)
        doing = "cutting the batch"
        pipeline = pipeline_of(schedule, request)
        pieces = pipeline.pieces if pipeline is not None else micro_batches(request.batch, request.accumulate)
        doing = "a training step"
        assumptions = Assumptions()
        assumptions.train(schedule.model)
        assumptions.attention(request.device)
        if pipeline is not None:
            assumptions.pipeline(len(pieces), request.mesh or {}, timed=request.device is not None)
        elif (request.mesh or {}).get("dp", 1) > 1:
            assumptions.replicas()
        if request.device is not None:
            assumptions.seconds(request.device)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        values = Values(mode)
        without_memory(schedule, mode, values)
        fakes = [fake_batch(piece, mode, values, assumptions) for piece in pieces]
        trackers = Trackers.of(schedule, request)
        model = schedule.model
        values.otherwise = lambda: assumptions.number() if trackers.place.step == "optimizer" else None
        watched = dataclasses.replace(request, optimizer=assumptions.told_of(request.optimizer))
        is_cuda = request.device is not None and request.device.type == "cuda"
        with torch.compiler.set_stance("force_eager"), attention_of_cuda() if is_cuda else nullcontext():
            if pipeline is None:
                train(schedule, fakes, watched, mode, trackers, values)
            else:
                train_stages(schedule, pipeline, fakes, watched, mode, trackers, values)
        assumptions.without_gradients(trackers.without_gradients)
        waits = pipeline.share if pipeline is not None else 0.0
        return Played(trackers.result(request), kinds_of_ranks(request.mesh), assumptions.found(), waits)
    except Exception as error:  # noqa: BLE001 - whatever the user's functions raise
        fault = explained(error, doing=doing, model=model)
        fault.__cause__ = fault.__context__ = None  # it crosses to another process as it is
        return fault


def estimate_rank(request: Request) -> RankEstimate:
    """As :func:`play`, in a process whose errors are looked at where they are raised."""
    played = play(request)
    if isinstance(played, SlapoError):
        raise played
    return played.estimate
