"""Access private names of torch: only here, under a contract test."""

from __future__ import annotations

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


def schedule_actions(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> list[list[Any]]:
    """Return the actions of each rank in a schedule of torch.

    Raises:
        AssertionError: torch's schedule refuses these numbers, or ValueError.
    """
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    return get_schedule_ops(name, ranks, microbatches, stages_per_rank)


def non_persistent_buffers_of(module: nn.Module) -> set[str]:
    """Return the live set of the names of a module's buffers that state dicts leave out."""
    return module._non_persistent_buffers_set


def hooks_of(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return the live tables of a module's forward, forward-pre, backward and backward-pre hooks."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` or ``torch.compile(module)`` was called."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def is_initialized(module: nn.Module) -> bool:
    """Return whether ``nn.Module.__init__`` has run."""
    return "_modules" in module.__dict__
