"""The memory of steps that run: the largest sum of the bytes of all tensors that the process holds at one time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["MemoryMeter"]

_STEPS = "slapo_tune: steps"


class MemoryMeter:
    """Measures from the making of the model to the end of its first steps.

    On CUDA it is what the caching allocator says, ``torch.cuda.max_memory_allocated``; on the CPU what torch's profiler
    hears from the allocator of tensors. Neither counts the process itself, its libraries, or what the allocator keeps.

    Args:
        device: e.g. ``"cpu"`` or ``"cuda:0"``.

    Attributes:
        peak: bytes, once the steps have run.
    """

    def __init__(self, device: str) -> None:
        self._is_cuda = device.startswith("cuda")
        self._profiler: Any = None
        self.peak = 0

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Everything that is held has to be made inside of this, and the steps be run."""
        if self._is_cuda:
            yield
            self.peak = torch.cuda.max_memory_allocated()
            return
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            yield
        self.peak = _peak(profiler)

    @contextlib.contextmanager
    def steps(self) -> Iterator[None]:
        """The steps: what making the model took for a while does not count."""
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()
            yield
            return
        with torch.profiler.record_function(_STEPS):
            yield


def _peak(profiler: Any) -> int:
    """The largest sum of what was taken and not yet given back, while the steps ran."""
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    held = peak = 0
    begin = next(event.start_ns() for event in events if event.name() == _STEPS)
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            if event.start_ns() >= begin:
                peak = max(peak, held)
    return peak
