"""One played step, parted where units begin and end: how many bytes each part holds at most, and what it costs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from slapo_core.estimation.child import Trackers
    from slapo_core.schedule.schedule import Schedule

__all__ = ["Part", "Profile", "WatchUnits"]


@dataclass(frozen=True)
class Part:
    """What lies between two places where a unit begins or ends.

    Args:
        label: of the place where it begins: what happens there, the unit, and which time it does.
        most: bytes held at most.
        flops: that it takes.
        seconds: that it takes, by the roofline; 0 without a device.
        live: for each unit how many of its calls have run forward, and not begun to run backward.
        active: the unit that runs; -1 for none.
    """

    label: tuple[str, int, int]
    most: int
    flops: int
    seconds: float
    live: tuple[int, ...]
    active: int


@dataclass(frozen=True)
class Profile:
    """One kind of rank.

    Args:
        parts: of a step, in order.
        kept: for each unit: by how many bytes one call of it raised what is held; the mean of its calls.
        calls: for each unit how often it is called.
    """

    parts: tuple[Part, ...]
    kept: tuple[float, ...]
    calls: tuple[int, ...]


@dataclass(frozen=True)
class WatchUnits:
    """Makes the observer, in the process that plays the rank.

    Args:
        paths: of the units.
    """

    paths: tuple[str, ...]

    def __call__(self, schedule: Schedule, trackers: Trackers) -> UnitObserver:
        modules = [schedule.tree.node(path).module for path in self.paths]
        return UnitObserver(modules, trackers)


class UnitObserver:
    """Parts the step; an observer that must come after those it reads.

    Args:
        modules: the units. Their forwards are wrapped: hooks of this observer's own would change what other hooks do.
        trackers: that count.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], trackers: Trackers) -> None:
        self._trackers = trackers
        self._count, self._most = len(modules), 0
        self.begin()
        for number, module in enumerate(modules):
            module.__dict__["forward"] = self._parting(module.forward, number)

    def begin(self) -> None:
        self._parts: list[Part] = []
        self._live = [0] * self._count
        self._kept = [0.0] * self._count
        self._calls = [0] * self._count
        self._times: dict[tuple[str, int], int] = {}
        self._open("step", -1)

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if self._label[0] != "optimizer" and self._trackers.place.step == "optimizer":
            self._part("optimizer", -1)
        total = self._trackers.memory.total
        if total > self._most:
            self._most = total

    def result(self) -> Profile:
        """Of the step that began last."""
        self._close()
        kept = tuple(kept / max(calls, 1) for kept, calls in zip(self._kept, self._calls, strict=True))
        return Profile(tuple(self._parts), kept, tuple(self._calls))

    def _parting(self, forward: Any, number: int) -> Any:
        @functools.wraps(forward)
        def parting(*args: Any, **kwargs: Any) -> Any:
            self._part("forward", number)
            before = self._trackers.memory.total
            output = forward(*args, **kwargs)
            self._kept[number] += self._trackers.memory.total - before
            self._calls[number] += 1
            if self._listen(output, number):
                self._live[number] += 1
            self._part("after", number, active=-1)
            return output

        return parting

    def _listen(self, output: Any, number: int) -> bool:
        """Notice when the backward pass of a call begins: when the first gradient of what it gave is there."""
        began: list[bool] = []

        def begins(_: torch.Tensor) -> None:
            if not began:
                began.append(True)
                self._live[number] -= 1
                self._part("backward", number)

        differentiable = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        for leaf in differentiable:
            leaf.register_hook(begins)
        return bool(differentiable)

    def _part(self, what: str, number: int, *, active: int | None = None) -> None:
        self._close()
        self._open(what, number, active)

    def _open(self, what: str, number: int, active: int | None = None) -> None:
        time = self._times[what, number] = self._times.get((what, number), -1) + 1
        self._label = (what, number, time)
        self._active = number if active is None else active
        self._most = self._trackers.memory.total
        self._live_then = tuple(self._live)
        self._spent = self._trackers.spent()

    def _close(self) -> None:
        flops, seconds = (now - then for now, then in zip(self._trackers.spent(), self._spent, strict=True))
        self._parts.append(Part(self._label, self._most, int(flops), seconds, self._live_then, self._active))
