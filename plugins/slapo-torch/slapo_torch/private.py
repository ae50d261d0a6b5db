"""Wrap private names of torch; a test checks the installed version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_tensors_hooks

__all__ = ["begin", "has_gradient_hooks", "is_compiled", "reduce_accumulated", "storage_id", "top_saved_tensors_hooks"]


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Return whether hooks of the gradient, or of its accumulation, are registered on a parameter."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` was called."""
    return module._compiled_call_impl is not None


def storage_id(tensor: torch.Tensor) -> int:
    """Return the identity of a storage, or of a tensor without strides."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def begin(units: Sequence[Any]) -> None:
    """Make the first of nested modules under ``fully_shard`` the root of the others, although it is never called."""
    units[0]._get_fsdp_state()._lazy_init()


def reduce_accumulated(units: Sequence[Any]) -> None:
    """Reduce the gradients that modules under ``fully_shard`` accumulated over backward passes, as pipelining does.

    Args:
        units: that :func:`begin` took.
    """
    root = units[0]._get_fsdp_state()
    root._state_ctx.is_last_backward = True
    for unit in reversed(units):
        state = unit._get_fsdp_state()
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        for group in filter(None, groups):
            group.post_backward()
    root._root_post_backward_final_callback()
    root._state_ctx.is_last_backward = False
