"""Clipping the gradients of a scheduled model by the norm that the reference model's would have."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from slapo_core.errors import ArgumentError
from slapo_core.live.session import live_state
from slapo_core.weights.clipping import GradientClipper

if TYPE_CHECKING:
    import torch

    from slapo_core.schedule.schedule import Schedule

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(
    sch: Schedule, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale all gradients of a scheduled model down so that their norm over all ranks is at most ``max_norm``.

    In place of ``torch.nn.utils.clip_grad_norm_``, which sees the pieces of one rank only: another norm on every rank.
    Pieces are counted on all ranks that share a tensor, replicas and tied tensors once. A collective: every rank calls
    it, after the gradients of the replicas (``dp``) were averaged.

    Args:
        sch: the schedule, under which the model is trained without :func:`slapo_core.build`.
        max_norm: the largest norm, not negative; ``math.inf`` only measures.
        norm_type: p of the p-norm, positive; ``math.inf`` is the largest absolute value.
        error_if_nonfinite: raise instead of scaling by a norm that is infinite or no number.

    Returns:
        the norm before, a scalar tensor, the same on every rank.

    Raises:
        ArgumentError: something else than a schedule, or a number that cannot be meant.
        SealedError: the schedule was built; ``build(max_grad_norm=...)`` clips there.
        WeightsError: a tensor that nobody explains.
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set; on every rank, and nothing was scaled.
    """
    correspondence = live_state(sch, "clip_grad_norm_").correspondence
    if math.isnan(max_norm) or max_norm < 0:
        raise ArgumentError(f"max_norm must not be negative (got {max_norm})", hint="clip_grad_norm_(sch, 1.0)")
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ArgumentError(
            f"norm_type must be positive (got {norm_type})", hint="norm_type=2.0, or math.inf for the largest value"
        )
    kept, modules = sch.kept("clip_grad_norm_"), correspondence.tree.index.modules.values()
    held = [tuple(map(id, module._parameters.values())) for module in modules]  # others after load_state_dict(assign)
    settings = (float(max_norm), norm_type, error_if_nonfinite)
    if kept.get(_KEY, ())[:2] != (held, settings):
        clipper = GradientClipper(
            correspondence, settings[0], norm_type=norm_type, error_if_nonfinite=error_if_nonfinite
        )
        kept[_KEY] = (held, settings, clipper)
    norm: torch.Tensor = kept[_KEY][2].clip()
    return norm


_KEY = "slapo_core.live.clipper"
