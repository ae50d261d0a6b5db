"""Parameters that a step gives no gradient: some runtimes step them with zeros, where torch leaves them alone."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from slapo_core.spec.request import BuildRequest

__all__ = ["UnusedParameters"]

_SHOWN = 5
_STEPS = 3


class UnusedParameters:
    """Watches training steps, and warns at the first one that gives some parameters no gradient; then it stops.

    It stops after three steps that gave each of them one, too: no later step pays for it.

    Args:
        request: of the build.
        runtime: its name, for the warning, e.g. ``"DeepSpeed"``.
        steps_with_zeros: whether it steps such parameters; else nothing is watched.
    """

    def __init__(self, request: BuildRequest, runtime: str, *, steps_with_zeros: bool = True) -> None:
        self._runtime = runtime
        self._names: dict[int, str] = {}
        self._seen: set[int] = set()
        self._handles: list[Any] = []
        self._steps = 0
        if not steps_with_zeros:
            return
        for live in request.state.tensors():
            if live.is_parameter and live.is_here and live.tensor.requires_grad:
                self._names[id(live.tensor)] = live.reference_name
                self._handles.append(live.tensor.register_post_accumulate_grad_hook(self.seen))

    def seen(self, parameter: torch.Tensor) -> None:
        """A parameter has a gradient."""
        self._seen.add(id(parameter))

    def step_begins(self) -> None:
        """What an earlier step that failed has seen does not count."""
        self._seen.clear()

    def step_is_over(self) -> None:
        """Warn, if this step is the first one that left some out."""
        self._steps += 1
        if not self._names.keys() <= self._seen:
            names = [name for key, name in self._names.items() if key not in self._seen]
            self.stop()
            which = "the first training step" if self._steps == 1 else f"training step {self._steps}"
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            warnings.warn(
                f"{which} gave {', '.join(map(repr, names[:_SHOWN]))}{more} no gradient: {self._runtime} steps them "
                "with a gradient of zero, so that weight decay and momentum change them, where torch leaves them "
                "alone; set requires_grad=False on what the loss does not depend on, before build",
                stacklevel=3,
            )
        elif self._steps == _STEPS:
            self.stop()
        self._seen.clear()

    def stop(self) -> None:
        """Stop to watch."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._names.clear()
