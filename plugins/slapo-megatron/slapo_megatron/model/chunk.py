"""A model, or a part of one, in the form in which Megatron takes it. Imports Megatron: import it in functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from megatron.core.enums import ModelType
from torch import nn

from slapo_megatron.model.precision import lowered, raised, working_dtype

__all__ = ["Chunk"]


class Chunk(nn.Module):
    """What DistributedDataParallel wraps, with all attributes that Megatron's schedules ask for.

    Args:
        model: the scheduled one; its forward is called with whatever this one is. In lower precision, inputs of float32
            come to it in that, and its outputs are given out in float32.
        config: Megatron's.

    Attributes:
        around: what is done around each forward of the model.
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
        """What the stage before sent; there is none."""

    def shared_embedding_or_output_weight(self) -> None:
        return None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        dtype = working_dtype(self.config)
        args, kwargs = lowered((args, kwargs), dtype)
        with self.around():
            return raised(self.model(*args, **kwargs), dtype)
