"""Schedules of encoders, and of an encoder with a decoder: BERT, RoBERTa, T5.

Tensor parallelism follows Megatron-LM: two all-reduces forward and two backward per layer; a cross-attention adds one
forward and two backward, for its two inputs.
"""

from __future__ import annotations

from typing import Any

import slapo_core as slapo


def bert(
    sch: slapo.Schedule,
    *,
    kernels: bool = True,
    checkpoint: float = 0.0,
    embeddings: bool = True,
    stages: int = 1,
    compiler: str = "inductor",
    body: str = "bert",
    head: str = "cls.predictions",
) -> None:
    """Schedule transformers' ``BertForMaskedLM`` (and, with other paths, similar models).

    Args:
        sch: the schedule; tensor parallelism is over its mesh dimension ``tp``.
        kernels: whether to trace each layer, replace its attention, and fuse bias and GELU, and bias, dropout,
            residual and LayerNorm. The model must be made with ``attn_implementation="eager"``.
        checkpoint: share of layers to checkpoint, from the first one: 0 to 1.
        embeddings: whether to shard word embeddings and head along the vocabulary, and to compute the loss from hidden
            states and the head's shards: in training ``output.logits`` has no values.
        stages: number of pipeline stages, with equal numbers of layers.
        compiler: compiler of the fused regions.
        body: path of the model without its head.
        head: path of the module with the decoder and its bias.

    Raises:
        PreconditionError: a step is refused, e.g. sizes are not divisible by ``tp``, or the pattern of a kernel has no
            match in a layer.

    Source: paper appendix A.
    """
    layers: Any = sch[f"{body}.encoder.layer.*"]
    for name in ("query", "key", "value"):
        layers[f"attention.self.{name}"].shard(["weight", "bias"], axis=0)
    layers["attention.self"].sync("bwd_post", "all_reduce").fork_rng()
    layers["attention.output.dense"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    layers["intermediate.dense"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    layers["output.dense"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    if embeddings:
        sch[f"{body}.embeddings.word_embeddings"].shard("weight", axis=0, pad=True).sync("fwd_post", "all_reduce")
        sch[head].shard("bias", axis=0, pad=True)
        sch[f"{head}.decoder"].sync("bwd_post", "all_reduce").linear_cross_entropy()
    if kernels:
        for name in ("intermediate", "attention.output", "output"):
            layers[f"{name}.dense"].decompose()
        layers.trace(flatten=True).replace(match="fusion.sdpa")
        layers.fuse("fusion.bias_gelu", compiler=compiler, name="bias_gelu")
        layers.fuse("fusion.bias_dropout_add_norm", compiler=compiler, name="bias_dropout_add_norm")
    for layer in list(layers)[: round(checkpoint * len(layers))]:
        layer.checkpoint()
    for stage in range(1, stages):
        layers[stage * len(layers) // stages - 1].pipeline_split()


def roberta(
    sch: slapo.Schedule,
    *,
    kernels: bool = True,
    checkpoint: float = 0.0,
    embeddings: bool = True,
    stages: int = 1,
    compiler: str = "inductor",
) -> None:
    """Schedule transformers' ``RobertaForMaskedLM`` by :func:`bert` with other paths.

    Args:
        sch: see :func:`bert`.
        kernels: see :func:`bert`.
        checkpoint: see :func:`bert`.
        embeddings: see :func:`bert`.
        stages: see :func:`bert`.
        compiler: see :func:`bert`.

    Raises:
        PreconditionError: see :func:`bert`.
    """
    options: Any = {"kernels": kernels, "checkpoint": checkpoint, "embeddings": embeddings, "stages": stages}
    bert(sch, **options, compiler=compiler, body="roberta", head="lm_head")


def t5(
    sch: slapo.Schedule,
    *,
    kernels: bool = True,
    checkpoint: float = 0.0,
    embeddings: bool = True,
    stages: int = 1,
) -> None:
    """Schedule transformers' ``T5ForConditionalGeneration``: T5, and gated and untied T5 1.1.

    Args:
        sch: see :func:`bert`.
        kernels: whether to trace each block and replace its attentions and norms. The model must be made with
            ``attn_implementation="eager"``.
        checkpoint: share of blocks to checkpoint, the encoder's first; see :func:`bert`.
        embeddings: see :func:`bert`.
        stages: number of pipeline stages, with equal numbers of blocks of encoder and decoder.

    Raises:
        PreconditionError: see :func:`bert`.
    """
    blocks: Any = sch["*coder.block.*"]
    for axis, *names in ((0, "*Attention.[qkv]", "DenseReluDense.wi*"), (1, "*Attention.o", "DenseReluDense.wo")):
        for name in names:
            blocks[f"layer.*.{name}"].shard("weight", axis=axis)
    for name, place, *inputs in (
        ("*Attention.o", "fwd_post"),
        ("DenseReluDense.wo", "fwd_post"),
        ("SelfAttention", "bwd_post", "hidden_states"),
        ("EncDecAttention", "bwd_post", "hidden_states", "key_value_states"),
        ("DenseReluDense", "bwd_post", "hidden_states"),
    ):
        blocks[f"layer.*.{name}"].sync(place, "all_reduce", inputs=tuple(inputs) or None)
    for name in ("*Attention", "DenseReluDense.dropout"):
        blocks[f"layer.*.{name}"].fork_rng()
    blocks["layer.*.*Attention"].shard_attribute("n_heads")["*_bias"].shard("weight", axis=1)
    if embeddings:
        for name in ("lm_head", "shared") if len(sch["lm_head"].ties("weight")) == 1 else ("lm_head",):
            sch[name].shard("weight", axis=0, pad=True)
        sch["lm_head"].sync("bwd_post", "all_reduce").linear_cross_entropy()
        sch["*coder.embed_tokens"].sync("fwd_post", "all_reduce")
    if kernels:
        blocks.trace(flatten=True).replace(match="fusion.sdpa").replace(match="fusion.rms_norm")
    for block in list(blocks)[: round(checkpoint * len(blocks))]:
        block.checkpoint()
    for stage in range(1, stages):
        blocks[stage * len(blocks) // stages - 1].pipeline_split()
