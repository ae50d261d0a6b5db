"""Megatron's own objects of one engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Megatron:
    """``engine.megatron``: for everything else that users do with them.

    Args:
        chunks: the model, or this rank's stages of it, each in Megatron's DistributedDataParallel.
        optimizer: Megatron's; None where the engine only evaluates.
        scheduler: Megatron's ``OptimizerParamScheduler``; None where the user's factory made the optimizer.
        config: the ``TransformerConfig`` that the schedules read.
        following: lets ``get_cuda_rng_tracker()`` follow torch's random state, until the engine is closed.
    """

    chunks: list[Any]
    optimizer: Any
    scheduler: Any
    config: Any
    following: Any = None
