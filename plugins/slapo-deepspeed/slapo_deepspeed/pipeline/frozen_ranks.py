"""Give ranks without trained parameters a placeholder, which DeepSpeed's optimizers need.

Such a rank trains one unused number, whose gradient is zero in every backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from slapo_runtime.context import BuildContext


def bare_ranks(context: BuildContext) -> frozenset[int]:
    """The ranks along ``pp`` that train nothing; every rank knows all of them."""
    mesh, placement = context.schedule.mesh, context.placement
    assert mesh is not None
    assert placement is not None
    training = {
        rank
        for live in context.state.tensors()
        if live.is_parameter and live.tensor.requires_grad
        for rank in placement.holders(live)
    }
    return frozenset(range(mesh.size("pp"))) - training


def placeholder(context: BuildContext) -> nn.Parameter:
    """Make the placeholder of such a rank, with the dtype and device of its parameters."""
    here = (live.tensor for live in context.state.tensors() if live.is_local and live.tensor.is_floating_point())
    like = next(here, torch.empty(0))
    return nn.Parameter(torch.zeros(1, dtype=like.dtype, device=like.device))
