"""The memory of steps that run: the largest sum of the bytes of all tensors that the process holds at one time."""

from __future__ import annotations

import bisect
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
    """The most bytes given out at one time while the steps ran."""
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
            blocks.give(address, size)
        else:
            blocks.take_back(address)
        if when >= begin:
            peak = max(peak, blocks.held)
    return peak


class _Blocks:
    """Blocks of memory that are given out.

    The profiler hears nothing of a block that another thread gives back, as those of gloo do with messages. Such a
    block is known to be free when one that overlaps it is given out.

    Attributes:
        held: their bytes.
    """

    def __init__(self) -> None:
        self.held = 0
        self._addresses: list[int] = []  # ascending
        self._sizes: dict[int, int] = {}

    def give(self, address: int, size: int) -> None:
        place = bisect.bisect_left(self._addresses, address)
        if place and self._addresses[place - 1] + self._sizes[self._addresses[place - 1]] > address:
            place -= 1
            self._drop(place)
        while place < len(self._addresses) and self._addresses[place] < address + size:
            self._drop(place)
        self._addresses.insert(place, address)
        self._sizes[address] = size
        self.held += size

    def take_back(self, address: int) -> None:
        if address in self._sizes:  # others were given out before the profiler listened
            self._drop(bisect.bisect_left(self._addresses, address))

    def _drop(self, place: int) -> None:
        self.held -= self._sizes.pop(self._addresses.pop(place))
