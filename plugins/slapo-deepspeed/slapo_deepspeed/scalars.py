"""Parameters without axes, such as a scale of all logits.

DeepSpeed 0.19 sends every parameter from the first replica to the others as bytes, which torch cannot make of a tensor
without axes: it fails. So they are sent here, and DeepSpeed is told to leave them alone meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

__all__ = ["scalars_sent"]

_NOT_TO_BE_SENT = "ds_optim_param"  # what DeepSpeed reads where it sends the model, and nowhere else without its LoRA


@contextlib.contextmanager
def scalars_sent(model: nn.Module, group: Any) -> Iterator[None]:
    """Around ``deepspeed.initialize``: a collective over ``group``.

    Args:
        model: whose parameters without axes.
        group: of the replicas; None where there is one.
    """
    scalars = [one for one in model.parameters() if not one.dim() and not one.is_meta and not hasattr(one, "ds_id")]
    for parameter in scalars:
        if group is not None:
            dist.broadcast(parameter.data.reshape(1), group=group, group_src=0)
        setattr(parameter, _NOT_TO_BE_SENT, True)
    try:
        yield
    finally:
        for parameter in scalars:
            delattr(parameter, _NOT_TO_BE_SENT)
