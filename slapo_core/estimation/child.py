"""The process that plays one rank: a process group without peers, tensors without memory, two real steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from slapo_core.estimation.memory import MemoryTracker
from slapo_core.estimation.private import FakeStore, FakeTensorMode
from slapo_core.estimation.results import RankEstimate
from slapo_core.estimation.source import Source
from slapo_core.estimation.step import train
from slapo_core.estimation.tensors import fake_batch, without_memory
from slapo_core.spec.device import DeviceSpec

__all__ = ["Request", "estimate_rank"]


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
    """

    source: Source
    mesh: Mapping[str, int] | None
    rank: int
    ranks: tuple[int, ...]
    batch: Any
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    device: DeviceSpec | None = None


def estimate_rank(request: Request) -> RankEstimate:
    """Play the rank; the process must have no process group."""
    world_size = math.prod(request.mesh.values()) if request.mesh else 1
    if world_size > 1:
        dist.init_process_group("fake", rank=request.rank, world_size=world_size, store=FakeStore())
    schedule = request.source.schedule(request.mesh, request.batch)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    without_memory(schedule, mode)
    memory = MemoryTracker()
    train(schedule.model, fake_batch(request.batch, mode), request, mode, memory)
    return RankEstimate(request.rank, request.ranks, memory.peak, 0, ())
