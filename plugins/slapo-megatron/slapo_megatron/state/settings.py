"""Settings of Megatron's groups of parameters, and the counts of an optimizer that keeps them there.

Beside the settings of the optimizer, a group of Megatron's has what its scheduler makes them of (``wd_mult``,
``max_lr``, ...). Those are of the build: a checkpoint says what the optimizer had.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["counts_in_groups", "kind_of", "settings_of"]

_OF_THE_BUILD = (
    "wd_mult",
    "lr_mult",
    "max_lr",
    "min_lr",
    "start_wd",
    "end_wd",
    "pre_wd_mult",
    "pre_lr_mult",
    "default_config",
    "is_expert_parallel",
    "is_decoupled_lr",
)
_FUSED = ("lr", "betas", "eps", "weight_decay")  # what a fused Adam shares with that of torch


def counts_in_groups(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer counts its steps once for each group: the fused Adam of Transformer Engine and of Apex."""
    return type(optimizer).__name__ == "FusedAdam"


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """The class of torch that computes the same."""
    if not counts_in_groups(optimizer):
        return type(optimizer).__name__
    return "AdamW" if getattr(optimizer, "adam_w_mode", True) else "Adam"


def settings_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint holds of a group, and what one of it changes."""
    if counts_in_groups(optimizer):
        return {key: group[key] for key in _FUSED if key in group}
    return {key: value for key, value in group.items() if key != "params" and key not in _OF_THE_BUILD}
