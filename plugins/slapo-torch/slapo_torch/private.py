"""Wrap private names of torch; a test checks the installed version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_tensors_hooks
from torch.utils._pytree import tree_map_only

__all__ = [
    "begin",
    "has_gradient_hooks",
    "is_compiled",
    "reduce_accumulated",
    "reduce_dtypes",
    "storage_id",
    "top_saved_tensors_hooks",
    "tree_map_only",
    "unscale",
]


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Return whether hooks of the gradient, or of its accumulation, are registered on a parameter."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` was called."""
    return module._compiled_call_impl is not None


def storage_id(tensor: torch.Tensor) -> int:
    """Return the identity of a storage, or of a tensor without strides."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def reduce_dtypes(unit: Any) -> list[torch.dtype]:
    """Return the types in which a unit of ``fully_shard`` reduces its gradients, after its first pass."""
    found = [one for group in _groups(unit._get_fsdp_state()) for one in group.fsdp_params]
    trained = [one for one in found if one.sharded_param.requires_grad]
    return [one.reduce_dtype or one.param_dtype or one.orig_dtype for one in trained]


def unscale(gradients: Sequence[torch.Tensor], inverse: torch.Tensor, found: torch.Tensor) -> None:
    """Multiply gradients of one type and device in place; ``found`` becomes 1 if one is not finite."""
    torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), found, inverse)


def _groups(state: Any) -> list[Any]:
    """Return the parameter groups of a unit's state: before torch 2.12 it has one or none."""
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


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
        for group in _groups(unit._get_fsdp_state()):
            group.post_backward()
    root._root_post_backward_final_callback()
    root._state_ctx.is_last_backward = False
