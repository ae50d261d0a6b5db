"""Schedules of mixtures of experts: Mixtral, Qwen3-MoE.

The inner features of every expert are split, so that each rank has a shard of all experts: the router is full, tokens
stay where they are, and a layer has LLaMA's collectives and the sum of the routing weights' gradients.
"""

from __future__ import annotations

from typing import Any, Unpack

import slapo_core as slapo
from slapo_models.decoders import LlamaOptions


def mixtral(
    sch: slapo.Schedule,
    *,
    kernels: bool = True,
    attention: str = "fusion.sdpa",
    checkpoint: float = 0.0,
    embeddings: bool = True,
    stages: int = 1,
    compiler: str = "inductor",
) -> None:
    """Schedule transformers' ``MixtralForCausalLM``.

    Args:
        sch: see :func:`slapo_models.bert`.
        kernels: whether to trace each layer, replace its attention and its norms, and fuse rotary embeddings and
            SwiGLU. The model must be made with ``attn_implementation="eager"``, and with
            ``experts_implementation="grouped_mm"``, its default, or ``"batched_mm"``: the loop of ``"eager"`` cannot be
            traced. Not with ``output_router_logits=True``, whose hooks at the attentions keep them out of the graph.
        attention: see :func:`slapo_models.gpt`.
        checkpoint: see :func:`slapo_models.bert`.
        embeddings: see :func:`slapo_models.bert`.
        stages: see :func:`slapo_models.bert`.
        compiler: see :func:`slapo_models.bert`.

    Raises:
        PreconditionError: see :func:`slapo_models.bert`.
    """
    layers: Any = sch["model.layers.*"]
    layers["self_attn.q_proj"].shard("weight", axis=0)
    layers["self_attn.[kv]_proj"].shard("weight", axis=0, shards=sch.model.config.num_key_value_heads)  # type: ignore[union-attr]
    layers["self_attn.o_proj"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    layers["self_attn"].sync("bwd_post", "all_reduce")
    layers["mlp.experts"].shard("gate_up_proj", axis=1, packed=2).shard("down_proj", axis=2)
    layers["mlp.experts"].sync("bwd_post", "all_reduce", inputs=(0, 2)).sync("fwd_post", "all_reduce")
    if embeddings:
        sch["model.embed_tokens"].shard("weight", axis=0, pad=True).sync("fwd_post", "all_reduce")
        if len(sch["lm_head"].ties("weight")) == 1:
            sch["lm_head"].shard("weight", axis=0, pad=True)
        sch["lm_head"].sync("bwd_post", "all_reduce").linear_cross_entropy()
    if kernels:
        layers.trace(flatten=True).replace(match=attention).replace(match="fusion.rms_norm")
        for pattern in ("fusion.rotary", "fusion.swiglu"):
            layers.fuse(pattern, compiler=compiler)
    for layer in list(layers)[: round(checkpoint * len(layers))]:
        layer.checkpoint()
    for stage in range(1, stages):
        layers[stage * len(layers) // stages - 1].pipeline_split()


def qwen3_moe(sch: slapo.Schedule, **options: Unpack[LlamaOptions]) -> None:
    """Schedule transformers' ``Qwen3MoeForCausalLM`` by :func:`mixtral`, and with norms of single heads.

    Every layer must have experts.

    Args:
        sch: see :func:`slapo_models.bert`.
        options: keyword arguments of :func:`mixtral`.

    Raises:
        PreconditionError: see :func:`slapo_models.bert`.
    """
    mixtral(sch, **options)
    sch["model.layers.*.self_attn.[qk]_norm"].sync_gradient("weight")
