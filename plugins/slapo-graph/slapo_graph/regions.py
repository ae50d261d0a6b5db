"""Regions of a forward: no_grad and autocast, switched in the graph where the recorded code switched them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from slapo_graph.private import set_grad_enabled

if TYPE_CHECKING:
    from slapo_graph.recording import Recording


DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu")
State = tuple[bool, tuple[tuple[bool, torch.dtype], ...], bool]


def state() -> State:
    """What decides how the next call computes: gradients, autocast for each kind of device, its cache."""
    return (
        torch.is_grad_enabled(),
        tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in DEVICES),
        torch.is_autocast_cache_enabled(),
    )


class Regions:
    """Writes the switches into the graph whenever a call is made in another state than the one before it."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.now = self.entry = state()

    def enter(self) -> None:
        """Before a call is written."""
        present = state()
        if present == self.now:
            return
        self.now = present
        grad, autocast, cache = present
        self.recording.compute(set_state, (grad, autocast, cache))

    def finish(self) -> None:
        """At the end: the state of the beginning again."""
        if self.now != self.entry:
            self.now = self.entry
            grad, autocast, cache = self.entry
            self.recording.compute(set_state, (grad, autocast, cache))


def set_state(grad: bool, autocast: tuple[tuple[bool, torch.dtype], ...], cache: bool) -> None:
    """Switch to a state of :func:`state`.

    Where autocast ends, what it keeps ends with it, as it does at the end of torch's own regions: its copies of weights
    are those of before the optimizer's step, and made under ``no_grad`` they take no gradient.
    """
    set_grad_enabled(grad)
    for kind, (enabled, dtype) in zip(DEVICES, autocast, strict=True):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(cache)
    if not torch.compiler.is_compiling() and not any(enabled for enabled, _ in autocast):
        torch.clear_autocast_cache()
