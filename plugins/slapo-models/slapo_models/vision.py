"""Schedules of vision models: ViT, WideResNet."""

from __future__ import annotations

from typing import Any

import slapo_core as slapo


def vit(
    sch: slapo.Schedule,
    *,
    kernels: bool = True,
    checkpoint: float = 0.0,
    embeddings: bool = True,
    stages: int = 1,
    compiler: str = "inductor",
) -> None:
    """Schedule transformers' ``ViTForImageClassification``.

    Args:
        sch: see :func:`slapo_models.bert`.
        kernels: whether to trace each layer, replace its attention, and fuse bias and GELU, and bias, dropout, residual
            and LayerNorm. The model must be made with ``attn_implementation="eager"``.
        checkpoint: see :func:`slapo_models.bert`.
        embeddings: whether to shard the classifier along its classes.
        stages: see :func:`slapo_models.bert`.
        compiler: see :func:`slapo_models.bert`.

    Raises:
        PreconditionError: see :func:`slapo_models.bert`.
    """
    layers: Any = sch["vit.layers.*"]
    packed = ["weight", "bias"] if sch.model.config.qkv_bias else ["weight"]  # type: ignore[union-attr]
    layers["attention.[qkv]_proj"].shard(packed, axis=0)
    layers["attention"].sync("bwd_post", "all_reduce").fork_rng()
    layers["mlp.fc1"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    for name in ("attention.o_proj", "mlp.fc2"):
        layers[name].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    if embeddings:
        sch["classifier"].shard(["weight", "bias"], axis=0, pad=True)
        sch["classifier"].sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather")
    if kernels:
        for name in ("attention.o_proj", "mlp.fc1"):
            layers[name].decompose()
        layers.trace(flatten=True).replace(match="fusion.sdpa")
        for pattern in ("fusion.bias_gelu", "fusion.bias_dropout_add_norm"):
            layers.fuse(pattern, compiler=compiler)
    for layer in list(layers)[: round(checkpoint * len(layers))]:
        layer.checkpoint()
    for stage in range(1, stages):
        layers[stage * len(layers) // stages - 1].pipeline_split()


def wide_resnet(
    sch: slapo.Schedule,
    *,
    kernels: bool = True,
    checkpoint: float = 0.0,
    embeddings: bool = True,
    stages: int = 1,
    compiler: str = "inductor",
) -> None:
    """Schedule torchvision's ``wide_resnet50_2`` and ``wide_resnet101_2``.

    In each block the first two convolutions are split as a pair, the third one by its output.

    Args:
        sch: see :func:`slapo_models.bert`.
        kernels: whether to trace each block and fuse the sum with the residual and its ReLU.
        checkpoint: see :func:`slapo_models.bert`.
        embeddings: whether to shard the classifier.
        stages: see :func:`slapo_models.bert`.
        compiler: see :func:`slapo_models.bert`.

    Raises:
        PreconditionError: see :func:`slapo_models.bert`.
    """
    blocks: Any = sch["layer*.*"]
    for name in ("conv1", "conv3"):
        blocks[name].shard("weight", axis=0).sync("bwd_post", "all_reduce")
    for name in ("bn1", "bn3"):
        blocks[name].shard(["weight", "bias", "running_mean", "running_var"], axis=0)
    blocks["conv2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    blocks["bn3"].sync("fwd_post", "all_gather", axis=1)
    if embeddings:
        sch["fc"].shard(["weight", "bias"], axis=0, pad=True)
        sch["fc"].sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather")
    if kernels:
        blocks.trace(flatten=True).fuse(lambda x, identity: x.add_(identity).relu_(), compiler=compiler)
    for block in list(blocks)[: round(checkpoint * len(blocks))]:
        block.checkpoint()
    for stage in range(1, stages):
        blocks[stage * len(blocks) // stages - 1].pipeline_split()
