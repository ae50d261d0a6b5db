"""Parameters that a step gives no gradient: DeepSpeed steps them with zeros, where torch leaves them alone."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from slapo_core.spec.request import BuildRequest

__all__ = ["UnusedParameters"]

_SHOWN = 5


class UnusedParameters:
    """Watches the first training step, and warns of what it gave no gradient; later steps cost nothing.

    Args:
        request: of the build.
        engine: DeepSpeed's.
    """

    def __init__(self, request: BuildRequest, engine: Any) -> None:
        self._names: dict[int, str] = {}
        self._handles: list[Any] = []
        if not _steps_with_zeros(engine):
            return
        for live in request.state.tensors():
            if live.is_parameter and live.is_here and live.tensor.requires_grad:
                self._names[id(live.tensor)] = live.reference_name
                self._handles.append(live.tensor.register_post_accumulate_grad_hook(self.seen))

    def seen(self, parameter: torch.Tensor) -> None:
        """A parameter has a gradient."""
        self._names.pop(id(parameter), None)

    def step_is_over(self) -> None:
        """Warn, and stop to watch."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        names = list(self._names.values())
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            warnings.warn(
                f"the first training step gave {', '.join(map(repr, names[:_SHOWN]))}{more} no gradient: DeepSpeed "
                "steps them with a gradient of zero, so that weight decay and momentum change them, where torch leaves "
                "them alone; set requires_grad=False on what the loss does not depend on, before build",
                stacklevel=3,
            )
        self._names.clear()

    def stop(self) -> None:
        """Stop to watch."""
        self._names.clear()
        self.step_is_over()


def _steps_with_zeros(engine: Any) -> bool:
    """Not in full precision without ZeRO, on one replica: there the optimiser is torch's, on the model's gradients."""
    low = engine.fp16_enabled() or engine.bfloat16_enabled()
    return bool(engine.optimizer is not None and (engine.zero_optimization() or low or engine.dp_world_size > 1))
