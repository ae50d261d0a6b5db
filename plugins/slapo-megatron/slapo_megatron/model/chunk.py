"""Wrap a model for Megatron, in lower precision if asked. Imports Megatron: import it in functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.enums import ModelType
from torch import nn

from slapo_megatron.private import tree_map

_LOW = (torch.float16, torch.bfloat16)


def working_dtype(config: Any) -> torch.dtype | None:
    """Return the dtype of the computation; None if unchanged.

    Args:
        config: Megatron's, of a model or of an optimizer.
    """
    if config.bf16:
        return torch.bfloat16
    return torch.float16 if config.fp16 else None


def lower_model(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Cast the parameters in place; each stays the same object.

    Buffers keep their dtypes, unlike in Megatron's ``Float16Module``: rotary frequencies in bfloat16 rotate position
    4000 by 0.7 rad.

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


class Chunk(nn.Module):
    """Wrap a model for DistributedDataParallel and Megatron's schedules.

    Args:
        model: the scheduled one; its forward is called with whatever this one is. In lower precision, inputs of float32
            come to it in that, and its outputs are given out in float32.
        config: Megatron's.

    Attributes:
        around: a context manager around each forward of the model.
    """

    model_type = ModelType.encoder_or_decoder
    pre_process = post_process = True
    share_embeddings_and_output_weights = False  # ties are summed by the engine, wherever they are
    vp_stage: int | None = None

    def __init__(self, model: nn.Module, config: Any) -> None:
        super().__init__()
        self.model = model
        self.config = config
        self.around: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Ignore the previous stage's message: there is none."""

    def shared_embedding_or_output_weight(self) -> None:
        return None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        dtype = working_dtype(self.config)
        args, kwargs = lowered((args, kwargs), dtype)
        with self.around():
            return raised(self.model(*args, **kwargs), dtype)
