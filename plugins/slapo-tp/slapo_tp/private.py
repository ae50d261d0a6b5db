"""Names of torch that are not public and that this plugin needs: what a new version of torch may change is here."""

from __future__ import annotations

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


def has_global_forward_hooks() -> bool:
    """Return whether a hook is registered for the forward of every module."""
    return bool(_module._global_forward_hooks or _module._global_forward_pre_hooks)


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the live table of a module's own parameters by name; None for unset ones."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the live table of a module's own buffers by name; None for unset ones."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the live table of a module's children by name; None for unset ones."""
    return module._modules
