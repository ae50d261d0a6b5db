"""What a function gives, asked on tensors without values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["Shapes", "differs", "of_output", "without_values"]

Shapes = list[tuple[tuple[int, ...], torch.dtype]]


def without_values(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Shapes | None:
    """Shapes and types of what a function gives; None if it does not run on tensors without values."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            args, kwargs = tree_map_only(Tensor, _like, (args, dict(kwargs)))
            return of_output(function(*args, **kwargs))
    except (RuntimeError, NotImplementedError):
        return None


def of_output(output: Any) -> Shapes:
    """Shape and type of each tensor in an output."""
    return [(tuple(map(int, leaf.shape)), leaf.dtype) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def differs(expected: Shapes | None, got: Shapes | None) -> str | None:
    """How two outputs differ; None if they do not, or one of them is not known."""
    if expected is None or got is None or got == expected:
        return None
    return f"the kernel gives {_shown(got)}, where the replaced code gives {_shown(expected)}"


def _like(tensor: Tensor) -> Tensor:
    strides = tuple(map(int, tensor.stride()))
    return torch.empty_strided(tuple(map(int, tensor.shape)), strides, dtype=tensor.dtype, device=tensor.device)


def _shown(found: Shapes) -> str:
    return " and ".join(f"{shape} {str(dtype).removeprefix('torch.')}" for shape, dtype in found) or "no tensor"
