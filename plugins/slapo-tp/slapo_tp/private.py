"""Wrap the private names of torch that this distribution uses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode as detect_fake_mode
from torch._subclasses import FakeTensor as FakeTensor
from torch.nn.modules import module as _module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils._pytree import (
    tree_flatten as tree_flatten,
    tree_map_only as tree_map_only,
    tree_unflatten as tree_unflatten,
)

FUNCTIONAL = torch.ops._c10d_functional
"""The functional collectives as operators."""


def is_gloo(name: str) -> bool:
    """Return whether a named process group's backend is gloo."""
    from torch.distributed.distributed_c10d import _resolve_process_group, get_backend

    return bool(get_backend(_resolve_process_group(name)) == "gloo")  # type: ignore[arg-type]


is_gloo._dynamo_marked_constant = True  # type: ignore[attr-defined] # torch.compiler's decorator imports dynamo


def has_global_forward_hooks() -> bool:
    """Return whether a hook is registered for the forward of every module."""
    return bool(_module._global_forward_hooks or _module._global_forward_pre_hooks)


def forward_hooks_of(module: nn.Module) -> dict[int, Any]:
    """Return the live table of a module's forward hooks."""
    return module._forward_hooks


def has_gradient_hooks(tensor: Any) -> bool:
    """Return whether hooks are registered for a tensor's gradient."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def version_of(tensor: torch.Tensor) -> int:
    """Return the number of in-place changes of a tensor."""
    return tensor._version


def convolution(module: Any, input: torch.Tensor) -> torch.Tensor:
    """Run a convolution layer with its padding and without its bias."""
    return module._conv_forward(input, module.weight, None)
