"""Names of torch that are not public and that this plugin needs: what a new version of torch may change is here."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["NormBase", "TorchDispatchMode", "pytree"]

FLASH_ATTENTION_OF_CPU, GROUPED_MM = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._grouped_mm,
)
buffers_of: Callable[[nn.Module], dict[str, torch.Tensor | None]] = attrgetter("_buffers")
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
non_persistent_buffers_of: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")


def schedule_actions(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> list[list[Any]]:
    """The actions of each rank in torch's schedule of a name.

    Raises:
        AssertionError: the schedule does not take these numbers; ValueError likewise.
    """
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    return get_schedule_ops(name, ranks, microbatches, stages_per_rank)


def tensors_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the live tables of a module's own parameters and buffers by name."""
    return module._parameters, module._buffers


def hooks_of(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return the live tables of a module's forward, forward-pre, backward and backward-pre hooks."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` or ``torch.compile(module)`` was called."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def is_initialized(module: nn.Module) -> bool:
    """Return whether ``nn.Module.__init__`` has run."""
    return "_modules" in module.__dict__
