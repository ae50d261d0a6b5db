"""The norm of all gradients before clipping, where DeepSpeed computes it."""

from __future__ import annotations

import types
from typing import Any

import torch

__all__ = ["keep_norm", "norm_of_last_step"]


def keep_norm(engine: Any) -> None:
    """Let DeepSpeed's engine remember the norm that it clips by in fp32 without ZeRO, and otherwise forgets.

    Args:
        engine: DeepSpeed's.
    """
    from deepspeed.runtime.utils import clip_grad_norm_

    def clip_fp32_gradients(self: Any) -> None:
        self._global_grad_norm = clip_grad_norm_(
            parameters=self.module.parameters(), max_norm=self.gradient_clipping(), mpu=self.mpu
        )

    engine.clip_fp32_gradients = types.MethodType(clip_fp32_gradients, engine)


def norm_of_last_step(engine: Any) -> torch.Tensor | None:
    """A scalar tensor; None where DeepSpeed computed none."""
    norm = engine.get_global_grad_norm()
    if norm is None:
        return None
    return torch.as_tensor(norm, dtype=torch.float32).detach().reshape(()).clone()
