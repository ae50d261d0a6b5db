"""A model, or a part of one, in the form in which Megatron takes it. Imports Megatron: import it in functions."""

from __future__ import annotations

from typing import Any

from megatron.core.enums import ModelType
from torch import nn

__all__ = ["Chunk"]


class Chunk(nn.Module):
    """What DistributedDataParallel wraps, with all attributes that Megatron's schedules ask for.

    Args:
        model: the scheduled one; its forward is called with whatever this one is.
        config: Megatron's.
    """

    model_type = ModelType.encoder_or_decoder
    pre_process = post_process = True
    share_embeddings_and_output_weights = False  # ties are summed by the engine, wherever they are
    vp_stage: int | None = None

    def __init__(self, model: nn.Module, config: Any) -> None:
        super().__init__()
        self.model = model
        self.config = config

    def set_input_tensor(self, input_tensor: Any) -> None:
        """What the stage before sent; there is none."""

    def shared_embedding_or_output_weight(self) -> None:
        return None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)
