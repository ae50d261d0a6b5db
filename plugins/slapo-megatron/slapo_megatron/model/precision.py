"""Lower precision: parameters and inputs in it, outputs in float32, as Megatron's ``Float16Module`` has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

__all__ = ["lower_model", "lowered", "raised", "working_dtype"]

_LOW = (torch.float16, torch.bfloat16)


def working_dtype(config: Any) -> torch.dtype | None:
    """In what the model computes; None where it is left as it is.

    Args:
        config: Megatron's, of a model or of an optimizer.
    """
    if config.bf16:
        return torch.bfloat16
    return torch.float16 if config.fp16 else None


def lower_model(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Cast the parameters in place; each stays the same object.

    Buffers keep their dtypes, unlike in Megatron's ``Float16Module``: rotary frequencies in bfloat16 turn position 4000
    by 0.7 rad.

    Args:
        model: the scheduled one, every tensor in its place.
        dtype: None does nothing.
    """
    if dtype is not None:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)


def lowered(values: Any, dtype: torch.dtype | None) -> Any:
    """Inputs of the model, nested or not, with tensors of float32 in ``dtype``; None leaves them."""
    if dtype is None:
        return values
    return tree_map(lambda one: one.to(dtype) if _has(one, (torch.float32,)) else one, values)


def raised(values: Any, dtype: torch.dtype | None) -> Any:
    """Outputs of the model, nested or not, with tensors of lower precision in float32, unless ``dtype`` is None."""
    if dtype is None:
        return values
    return tree_map(lambda one: one.float() if _has(one, _LOW) else one, values)


def _has(value: Any, dtypes: tuple[torch.dtype, ...]) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in dtypes
