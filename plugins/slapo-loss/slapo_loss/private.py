"""Names of torch that are not public and that this plugin needs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch._guards import detect_fake_mode as detect_fake_mode


def keeps_graph() -> bool:
    """Return whether the running backward keeps its graph (``retain_graph=True``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def is_transformed() -> bool:
    """Return whether a transform of ``torch.func`` (``grad``, ``vmap``) is active."""
    return torch._C._are_functorch_transforms_active()


def without_torch_function() -> AbstractContextManager[None]:
    """Return a context in which tensor subclasses are plain tensors to functions of torch."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()  # type: ignore[assignment]
    return context


def gather_functional(tensor: torch.Tensor, size: int, name: str) -> torch.Tensor:
    """Gather over the ranks of a group: (...) -> (ranks, ...)."""
    ops = torch.ops._c10d_functional
    found = ops.wait_tensor.default(ops.all_gather_into_tensor.default(tensor.contiguous(), size, name))
    return found.view(size, *tensor.shape)


def without_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let torch.compile run a function as it is; torch.compiler.disable would import dynamo at once."""
    return _disable_dynamo(function)
