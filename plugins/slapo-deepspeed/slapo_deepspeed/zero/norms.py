"""The norm of all gradients before clipping, where DeepSpeed computes it."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch

from slapo_core import BuildError
from slapo_deepspeed.marks import PIECE

__all__ = ["keep_norm", "norm_of_last_step", "require_counted"]


def require_counted(engine: Any, marked: Sequence[torch.Tensor]) -> None:
    """Refuse what DeepSpeed's optimizer of bfloat16 fails at in the first step, on some ranks only.

    Args:
        engine: DeepSpeed's.
        marked: the parameters that are pieces.

    Raises:
        BuildError: the ranks along ``tp`` but the first one have nothing to count in the norm of all gradients.
    """
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    if engine.mp_world_size == 1 or not isinstance(engine.optimizer, BF16_Optimizer):
        return
    if not any(one.requires_grad for one in marked):
        raise BuildError(
            f"no parameter that is trained is split over the {engine.mp_world_size} ranks of mesh_dim 'tp', and "
            "DeepSpeed's optimizer for bfloat16 with gradients summed in float32 cannot take a norm of nothing",
            hint='leave out "data_types": {"grad_accum_dtype": "fp32"}, or a mesh without \'tp\'',
        )


def keep_norm(engine: Any) -> None:
    """Let DeepSpeed's engine remember the norm that it clips by in fp32 without ZeRO, and otherwise forgets.

    Args:
        engine: DeepSpeed's.
    """
    from deepspeed.runtime.utils import clip_grad_norm_

    def clip_fp32_gradients(self: Any) -> None:
        self._global_grad_norm = clip_grad_norm_(
            parameters=[_with_axes(one) for one in self.module.parameters()],
            max_norm=self.gradient_clipping(),
            mpu=self.mpu,
        )

    engine.clip_fp32_gradients = types.MethodType(clip_fp32_gradients, engine)


def norm_of_last_step(engine: Any) -> torch.Tensor | None:
    """A scalar tensor; None where DeepSpeed computed none."""
    norm = engine.get_global_grad_norm()
    if norm is None:
        return None
    return torch.as_tensor(norm, dtype=torch.float32).detach().reshape(()).clone()


def _with_axes(parameter: torch.Tensor) -> Any:
    """What DeepSpeed reads of a parameter; of a number, it cannot scale the gradient as it is."""
    if parameter.dim() or parameter.grad is None:
        return parameter
    marks = {name: value for name, value in vars(parameter).items() if name in PIECE}
    return types.SimpleNamespace(grad=parameter.grad.view(1), device=parameter.device, **marks)
