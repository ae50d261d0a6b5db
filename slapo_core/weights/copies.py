"""Copies of a model whose tensors cost no memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["copy_on_meta", "copy_with"]


def copy_on_meta(model: nn.Module) -> nn.Module:
    """A deep copy with every parameter and buffer on the meta device, so that it costs no memory."""
    return copy_with(model, lambda tensor: torch.empty_like(tensor.detach(), device="meta"))


def copy_with(model: nn.Module, twin_of: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """A deep copy in which ``twin_of(tensor)`` stands wherever ``model`` has that parameter or buffer.

    Args:
        model: it is only read.
        twin_of: the parameter or buffer -> a plain tensor; a parameter's becomes a parameter. Python attributes of the
            tensor are handed on.
    """
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        twin = twin_of(tensor)
        if isinstance(tensor, nn.Parameter):
            twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
        twin.__dict__.update(tensor.__dict__)
        memo[id(tensor)] = twin
    return copy.deepcopy(model, memo)
