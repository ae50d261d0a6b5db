"""Regions of a forward: no_grad and autocast, switched in the graph where the recorded code switched them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from slapo_graph.private import set_grad_enabled

if TYPE_CHECKING:
    from slapo_graph.tracing.recording import Recording


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

    Autocast's copies of weights end with the outermost region, as torch's own do: later they would be those of before
    the optimizer's step, and made under ``no_grad`` they may take no gradient. Inside of a region of the caller they
    stay; its end drops them.
    """
    is_graded_again = grad and not torch.is_grad_enabled()
    set_grad_enabled(grad)
    for kind, (enabled, dtype) in zip(DEVICES, autocast, strict=True):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(cache)
    if torch.compiler.is_compiling() or (any(enabled for enabled, _ in autocast) and not is_graded_again):
        return
    torch.autocast_increment_nesting()
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()
