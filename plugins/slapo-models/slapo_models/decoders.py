"""Schedules of decoders: GPT-2, OPT, LLaMA, Mistral, Qwen3, Gemma 2 and 3.

Tensor parallelism follows Megatron-LM: two all-reduces forward and two backward per layer.
"""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

import slapo_core as slapo


class LlamaOptions(TypedDict, total=False):
    """Options of :func:`llama`, for schedules that begin with it."""

    kernels: bool
    attention: str
    checkpoint: float
    embeddings: bool
    stages: int
    compiler: str


def gpt(
    sch: slapo.Schedule,
    *,
    kernels: bool = True,
    attention: str = "fusion.sdpa",
    checkpoint: float = 0.0,
    embeddings: bool = True,
    stages: int = 1,
    compiler: str = "inductor",
) -> None:
    """Schedule transformers' ``GPT2LMHeadModel``.

    Args:
        sch: see :func:`slapo_models.bert`.
        kernels: whether to trace each layer, replace its attention and its GELU, and fuse dropout, residual and
            LayerNorm. The model must be made with ``attn_implementation="eager"``.
        attention: pattern by which attention is replaced. ``"fusion.causal_sdpa"`` is for causal masks only (no
            padding, no cache) and checks the masks; it passes no mask, so that FlashAttention can be chosen.
        checkpoint: see :func:`slapo_models.bert`.
        embeddings: see :func:`slapo_models.bert`.
        stages: see :func:`slapo_models.bert`.
        compiler: see :func:`slapo_models.bert`.

    Raises:
        PreconditionError: see :func:`slapo_models.bert`.
    """
    layers: Any = sch["transformer.h.*"]
    for name, packed in (("attn.c_attn", 3), ("mlp.c_fc", 1)):
        layers[name].shard(["weight", "bias"], axis=1, packed=packed).sync("bwd_post", "all_reduce")
    layers["attn"].shard_attribute("split_size")
    layers["*.c_proj"].shard("weight", axis=0).sync("fwd_post", "all_reduce")
    if embeddings:
        sch["transformer.wte"].shard("weight", axis=0, pad=True).sync("fwd_post", "all_reduce")
        sch["lm_head"].sync("bwd_post", "all_reduce").linear_cross_entropy()
    if kernels:
        layers.trace(flatten=True).replace(match=attention).replace(match="fusion.gelu_tanh")
        layers.fuse("fusion.bias_dropout_add_norm", compiler=compiler)
    for layer in list(layers)[: round(checkpoint * len(layers))]:
        layer.checkpoint()
    for stage in range(1, stages):
        layers[stage * len(layers) // stages - 1].pipeline_split()


def opt(
    sch: slapo.Schedule,
    *,
    kernels: bool = True,
    attention: str = "fusion.sdpa",
    checkpoint: float = 0.0,
    embeddings: bool = True,
    stages: int = 1,
    compiler: str = "inductor",
) -> None:
    """Schedule transformers' ``OPTForCausalLM``.

    Args:
        sch: see :func:`slapo_models.bert`.
        kernels: whether to trace each layer, replace its attention, and fuse dropout, residual and LayerNorm. The model
            must be made with ``attn_implementation="eager"``.
        attention: see :func:`gpt`.
        checkpoint: see :func:`slapo_models.bert`.
        embeddings: see :func:`slapo_models.bert`.
        stages: see :func:`slapo_models.bert`.
        compiler: see :func:`slapo_models.bert`.

    Raises:
        PreconditionError: see :func:`slapo_models.bert`.
    """
    layers: Any = sch["model.decoder.layers.*"]
    layers["self_attn.[qkv]_proj"].shard(["weight", "bias"], axis=0)
    layers["self_attn"].shard_attribute("num_heads").sync("bwd_post", "all_reduce")
    layers["fc1"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    for name in ("self_attn.out_proj", "fc2"):
        layers[name].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    if embeddings:
        sch["model.decoder.embed_tokens"].shard("weight", axis=0, pad=True).sync("fwd_post", "all_reduce")
        sch["lm_head"].sync("bwd_post", "all_reduce").linear_cross_entropy()
    if kernels:
        layers.trace(flatten=True).replace(match=attention).fuse("fusion.bias_dropout_add_norm", compiler=compiler)
    for layer in list(layers)[: round(checkpoint * len(layers))]:
        layer.checkpoint()
    for stage in range(1, stages):
        layers[stage * len(layers) // stages - 1].pipeline_split()


def llama(
    sch: slapo.Schedule,
    *,
    kernels: bool = True,
    attention: str = "fusion.sdpa",
    checkpoint: float = 0.0,
    embeddings: bool = True,
    stages: int = 1,
    compiler: str = "inductor",
) -> None:
    """Schedule transformers' ``LlamaForCausalLM``, embeddings and head tied or not.

    Args:
        sch: see :func:`slapo_models.bert`.
        kernels: whether to trace each layer, replace its attention and its norms, and fuse rotary embeddings and
            SwiGLU. The model must be made with ``attn_implementation="eager"``.
        attention: see :func:`gpt`.
        checkpoint: see :func:`slapo_models.bert`.
        embeddings: see :func:`slapo_models.bert`.
        stages: see :func:`slapo_models.bert`.
        compiler: see :func:`slapo_models.bert`.

    Raises:
        PreconditionError: see :func:`slapo_models.bert`.
    """
    layers: Any = sch["model.layers.*"]
    for name, shards in (
        ("self_attn.q_proj", None),
        ("self_attn.[kv]_proj", sch.model.config.num_key_value_heads),  # type: ignore[union-attr]
        ("mlp.gate_proj", None),
        ("mlp.up_proj", None),
    ):
        layers[name].shard("weight", axis=0, shards=shards)
    for name in ("self_attn", "mlp"):
        layers[name].sync("bwd_post", "all_reduce")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        layers[name].shard("weight", axis=1).sync("fwd_post", "all_reduce")
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


def mistral(sch: slapo.Schedule, **options: Unpack[LlamaOptions]) -> None:
    """Schedule transformers' ``MistralForCausalLM`` by :func:`llama`.

    Its sliding window is in the mask: ``attention="fusion.causal_sdpa"`` is for shorter sequences.

    Args:
        sch: see :func:`slapo_models.bert`.
        options: keyword arguments of :func:`llama`.

    Raises:
        PreconditionError: see :func:`slapo_models.bert`.
    """
    llama(sch, **options)


def qwen3(sch: slapo.Schedule, **options: Unpack[LlamaOptions]) -> None:
    """Schedule transformers' ``Qwen3ForCausalLM`` by :func:`llama`, and with norms of single heads.

    Args:
        sch: see :func:`slapo_models.bert`.
        options: keyword arguments of :func:`llama`.

    Raises:
        PreconditionError: see :func:`slapo_models.bert`.
    """
    llama(sch, **options)
    sch["model.layers.*.self_attn.[qk]_norm"].sync_gradient("weight")


def gemma2(
    sch: slapo.Schedule,
    *,
    kernels: bool = True,
    checkpoint: float = 0.0,
    embeddings: bool = True,
    stages: int = 1,
    compiler: str = "inductor",
) -> None:
    """Schedule transformers' ``Gemma2ForCausalLM``, its matrices as :func:`llama`.

    Args:
        sch: see :func:`slapo_models.bert`.
        kernels: whether to trace each layer, replace its norms, and fuse the softmax of the capped scores, rotary
            embeddings and the gated GELU. The model must be made with ``attn_implementation="eager"``.
        checkpoint: see :func:`slapo_models.bert`.
        embeddings: see :func:`slapo_models.bert`; the cap of the logits is a part of the loss.
        stages: see :func:`slapo_models.bert`.
        compiler: see :func:`slapo_models.bert`.

    Raises:
        PreconditionError: see :func:`slapo_models.bert`.
    """
    layers: Any = sch["model.layers.*"]
    llama(sch, kernels=False, checkpoint=checkpoint, embeddings=embeddings, stages=stages)
    if kernels:
        layers.trace(flatten=True).replace(match="fusion.rms_norm")
        for pattern in ("fusion.rotary", capped_softmax, gated_gelu):
            layers.fuse(pattern, compiler=compiler)


def gemma3(
    sch: slapo.Schedule,
    *,
    kernels: bool = True,
    checkpoint: float = 0.0,
    embeddings: bool = True,
    stages: int = 1,
    compiler: str = "inductor",
) -> None:
    """Schedule transformers' ``Gemma3ForCausalLM``, its matrices as :func:`llama`.

    Args:
        sch: see :func:`slapo_models.bert`.
        kernels: whether to trace each layer, replace its attention and its norms, and fuse rotary embeddings and the
            gated GELU. The model must be made with ``attn_implementation="eager"``.
        checkpoint: see :func:`slapo_models.bert`.
        embeddings: see :func:`slapo_models.bert`.
        stages: see :func:`slapo_models.bert`.
        compiler: see :func:`slapo_models.bert`.

    Raises:
        PreconditionError: see :func:`slapo_models.bert`.
    """
    layers: Any = sch["model.layers.*"]
    llama(sch, kernels=False, checkpoint=checkpoint, embeddings=embeddings, stages=stages)
    layers["self_attn.[qk]_norm"].sync_gradient("weight")
    if kernels:
        layers.trace(flatten=True).replace(match="fusion.sdpa").replace(match="fusion.rms_norm")
        for pattern in ("fusion.rotary", gated_gelu):
            layers.fuse(pattern, compiler=compiler)


def capped_softmax(scores: Any, mask: Any) -> Any:
    """Write Gemma 2's softmax of capped scores, for a pattern."""
    import torch

    cap = slapo.patterns.any_constant()
    return torch.softmax((scores / cap).tanh() * cap + mask, -1, dtype=torch.float32)


def gated_gelu(gate: Any, up: Any) -> Any:
    """Write the product in Gemma's MLP, for a pattern."""
    from torch.nn import functional as F

    return F.gelu(gate, approximate="tanh") * up
