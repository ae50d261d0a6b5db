"""Wrap private names of torch; a test checks the installed version."""

from __future__ import annotations

import torch
from torch import nn
from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_tensors_hooks

__all__ = ["is_compiled", "storage_id", "top_saved_tensors_hooks"]


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` was called."""
    return module._compiled_call_impl is not None


def storage_id(tensor: torch.Tensor) -> int:
    """Return the identity of a storage, or of a tensor without strides."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)
