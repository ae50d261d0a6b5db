"""Parameters that a step gives no gradient: where DeepSpeed steps them with zeros."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slapo_core.spec.step_invariants import UnusedParameters

if TYPE_CHECKING:
    from slapo_core.spec.request import BuildRequest

__all__ = ["unused_parameters"]


def unused_parameters(request: BuildRequest, engine: Any) -> UnusedParameters:
    """What watches for them.

    Not in full precision without ZeRO, on one replica: there the optimizer is torch's, on the model's gradients.

    Args:
        request: of the build.
        engine: DeepSpeed's.
    """
    low = engine.fp16_enabled() or engine.bfloat16_enabled()
    with_zeros = engine.optimizer is not None and (engine.zero_optimization() or low or engine.dp_world_size > 1)
    return UnusedParameters(request, "DeepSpeed", steps_with_zeros=bool(with_zeros))
