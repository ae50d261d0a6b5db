"""Wrap the private names of torch that this distribution uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "pytree"]


def run_backward(roots: tuple[torch.Tensor, ...], cotangents: tuple[torch.Tensor, ...]) -> None:
    """Run autograd's engine itself, with the active torch-function modes."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward(roots, cotangents, False, False, (), allow_unreachable=True, accumulate_grad=True)


LOCAL_SCALAR = torch.ops.aten._local_scalar_dense.default
"""The operator that reads the value of a tensor of one element."""


def apply_to_tensors(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Convert a module's parameters and buffers in place, as ``module.to`` does."""
    return module._apply(function)


def refresh_flat_weights(module: nn.RNNBase) -> None:
    """Refresh the further references to its parameters that an RNN keeps."""
    module._init_flat_weights()


def storage_id(holder: torch.Tensor | torch.UntypedStorage) -> int:
    """Return the identity of a storage; of a tensor that is not strided, its own."""
    if isinstance(holder, torch.Tensor):
        return holder.untyped_storage()._cdata if holder.layout is torch.strided else id(holder)
    return holder._cdata
