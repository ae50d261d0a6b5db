"""Copies of models: in another floating-point type without a detour, or with tensors that share their memory."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from slapo_core.graph.examples import made_beforehand

__all__ = ["convert", "copy_model"]


def copy_model(
    model: nn.Module,
    memo: dict[int, Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
    shares_memory: bool = False,
) -> nn.Module:
    """A deep copy whose parameters keep the attributes that were set on them.

    Args:
        model: only read.
        memo: as for ``copy.deepcopy``: what was copied already, and what is copied from now on.
        dtype: that :func:`convert` will be asked for: as far as possible, the copy has it already.
        shares_memory: whether parameters and buffers are other objects over the same memory: for a copy that is to be
            looked at, or copied again, but not run. Not together with ``dtype``.
    """
    memo = {} if memo is None else memo
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) in memo:
            continue
        made = _made(tensor, dtype, shares_memory=shares_memory)
        if made is not None:
            memo[id(tensor)] = made
    memo |= {key: made for key, made in made_beforehand(model).items() if key not in memo}
    copied = copy.deepcopy(model, memo)
    for name, parameter in copied.named_parameters(remove_duplicate=False):
        original = model.get_parameter(name)
        for key, value in original.__dict__.items():
            parameter.__dict__.setdefault(key, value)
    return copied


def convert(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Convert the floating-point tensors in place; None leaves them."""
    return model if dtype is None else model._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)


def _made(tensor: torch.Tensor, dtype: torch.dtype | None, *, shares_memory: bool) -> torch.Tensor | None:
    """What stands for a tensor in a copy; None: what ``deepcopy`` makes of it."""
    is_plain = type(tensor) in (nn.Parameter, torch.Tensor) and tensor.layout is torch.strided and tensor.is_leaf
    if not is_plain or tensor.is_meta:
        return None
    if shares_memory:
        data = tensor.detach()
    elif dtype is not None and tensor.is_floating_point() and tensor.dtype is not dtype:
        data = tensor.detach().to(dtype)  # at once: a copy of the same type first would be memory for nothing
    else:
        return None
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(data, requires_grad=tensor.requires_grad)
    data.__dict__.update(tensor.__dict__)
    return data.requires_grad_(tensor.requires_grad)
