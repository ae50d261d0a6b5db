"""`Run`: one rank of a trial, and the default ``evaluate``: measured training steps."""

from __future__ import annotations

import bisect
import contextlib
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import slapo_core as slapo
from slapo_core.layout import DATA_DIMS
from slapo_tune.private import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_tune.samplers import Point
    from slapo_tune.settings import StudySettings

_STEPS = "slapo_tune: steps"


class NotFiniteError(ArithmeticError):
    """The loss of a step is NaN or infinite."""


@dataclass
class Run:
    """One rank of one trial.

    Args:
        study: settings of the study; without ``space``, and with the point's mesh as ``mesh``.
        point: point of the trial.
        schedule: schedule of the study's model, with the point's steps applied; on the meta device until it is built.
        rank: the global rank.
        batch: the study's batch at this point, on ``device``; None without ``batch=``.
        device: device of training: ``"cpu"``, or e.g. ``"cuda:1"``.
        measured: further numbers for the log by name, e.g. ``{"memory": bytes}``.
    """

    study: StudySettings
    point: Point
    schedule: Schedule
    rank: int
    batch: Any = None
    device: str = "cpu"
    measured: dict[str, Any] = field(default_factory=dict)

    def train(self) -> float:
        """Train as a study without ``evaluate`` does; return samples per second of all replicas.

        The value is the median over the measured steps, each with the time of its slowest rank. Sets in ``measured``:
        ``memory``, bytes of this rank's tensors at the peak of the steps; ``time``, seconds of a step; ``spread``,
        (longest - shortest) / median of the measured steps; ``loss`` of the first step, and ``last_loss`` of the last.

        Raises:
            NotFiniteError: a loss is NaN or infinite.
        """
        study = self.study
        meter = MemoryMeter(self.device)
        with meter.measuring():
            engine = slapo.build(
                self.schedule,
                target=study.target,
                optimizer=study.optimizer,
                loss=study.loss,
                device=None if self.device == "cpu" else self.device,
                **study.options_of(self.point),
            )
            with meter.steps():
                losses = [_step(engine, self)[1] for _ in range(max(2, study.warmup))]
        seconds = []
        for _ in range(study.steps):
            took, loss = _step(engine, self)
            seconds.append(took)
            losses.append(loss)
        for number, loss in enumerate(losses, start=1):
            if not math.isfinite(loss):
                raise NotFiniteError(f"the loss of step {number} is {loss}")
        slowest = _of_the_slowest(seconds)
        median = statistics.median(slowest)
        self.measured |= {
            "memory": meter.peak,
            "time": median,
            "spread": (max(slowest) - min(slowest)) / median,
            "loss": losses[0],
            "last_loss": losses[-1],
        }
        mesh = self.schedule.mesh
        replicas = math.prod(mesh.size(mesh_dim) for mesh_dim in DATA_DIMS) if mesh is not None else 1
        return samples_in(self.batch) * replicas / median


def _step(engine: Any, run: Run) -> tuple[float, float]:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
    _finish(run.device)
    before = time.perf_counter()
    result = engine.train_step(run.batch)
    _finish(run.device)
    return time.perf_counter() - before, float(result.loss)


def _finish(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def _of_the_slowest(seconds: list[float]) -> list[float]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return seconds
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, seconds)
    return [max(step) for step in zip(*every, strict=True)]


def samples_in(batch: Any) -> int:
    """Return the length of the first axis of a batch's first tensor that has one."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return len(leaf)
    raise TypeError(
        "samples per second needs a batch with a tensor whose first axis has the samples (got a "
        f"{type(batch).__name__} without one); or give evaluate="
    )


def to_device(batch: Any, device: str) -> Any:
    """Move a batch to a device."""
    return batch if device == "cpu" else tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)


class MemoryMeter:
    """Measure the peak memory of tensors, from the model to its first steps.

    On CUDA by ``torch.cuda.max_memory_allocated``; on the CPU by torch's profiler, which records allocations of
    tensors. Neither counts the process, its libraries, or the allocator's cache.

    Args:
        device: e.g. ``"cpu"`` or ``"cuda:0"``.

    Attributes:
        peak: bytes, after the steps.
    """

    def __init__(self, device: str) -> None:
        self._is_cuda = device.startswith("cuda")
        self._profiler: Any = None
        self.peak = 0

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure allocations: create the model and run the steps within."""
        if self._is_cuda:
            yield
            self.peak = torch.cuda.max_memory_allocated()
            return
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            yield
        self.peak = _peak(profiler)

    @contextlib.contextmanager
    def steps(self) -> Iterator[None]:
        """Mark the steps: temporary memory of the model's creation does not count."""
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()
            yield
            return
        with torch.profiler.record_function(_STEPS):
            yield


def _peak(profiler: Any) -> int:
    """Return the peak of allocated bytes during the steps."""
    blocks, begin, peak = _Blocks(), 0, 0
    taken = []
    waiting = list(profiler.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.name == "[memory]":
            taken.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        elif event.name == _STEPS:
            begin = event.start_time_ns
    for when, address, size in sorted(taken, key=lambda each: each[0]):
        if size > 0:
            blocks.allocate(address, size)
        else:
            blocks.free(address)
        if when >= begin:
            peak = max(peak, blocks.bytes)
    return peak


class _Blocks:
    """Allocated blocks of memory.

    The profiler misses blocks that another thread frees, e.g. messages of gloo. Such a block is free when an
    overlapping block is allocated.

    Attributes:
        bytes: their size.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._addresses: list[int] = []  # ascending
        self._sizes: dict[int, int] = {}

    def allocate(self, address: int, size: int) -> None:
        place = bisect.bisect_left(self._addresses, address)
        if place and self._addresses[place - 1] + self._sizes[self._addresses[place - 1]] > address:
            place -= 1
            self._drop(place)
        while place < len(self._addresses) and self._addresses[place] < address + size:
            self._drop(place)
        self._addresses.insert(place, address)
        self._sizes[address] = size
        self.bytes += size

    def free(self, address: int) -> None:
        if address in self._sizes:  # others were allocated before the profiler started
            self._drop(bisect.bisect_left(self._addresses, address))

    def _drop(self, place: int) -> None:
        self.bytes -= self._sizes.pop(self._addresses.pop(place))
