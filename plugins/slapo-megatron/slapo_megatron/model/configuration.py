"""Megatron's configuration of a model, for one that it knows nothing of. Imports Megatron: import it in functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron.core.transformer.transformer_config import TransformerConfig

if TYPE_CHECKING:
    from slapo_core.spec.mesh import Mesh

__all__ = ["transformer_config"]


def transformer_config(options: Mapping[str, Any], mesh: Mesh | None) -> TransformerConfig:
    """What DistributedDataParallel and the schedules read; sizes of layers are none of theirs, and stand for nothing.

    Args:
        options: of the plan.
        mesh: of the schedule.
    """
    size = mesh.size if mesh is not None else lambda _: 1
    heads = size("tp")
    return TransformerConfig(
        num_layers=size("pp"),
        hidden_size=heads,
        num_attention_heads=heads,
        **options["model_parallel_config"],
    )
