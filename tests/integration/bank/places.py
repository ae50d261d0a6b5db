"""Where in each model the modules are that mistakes are made at; ``{n}`` is the number of a layer."""

from __future__ import annotations

__all__ = ["ACTIVATIONS", "ATTENTIONS", "BLOCKS", "DROPOUTS", "HEADS", "MLPS", "NORMS", "SQUARES"]

BLOCKS = {
    "bert": ("bert.encoder.layer.{n}",),
    "gpt2": ("transformer.h.{n}",),
    "llama": ("model.layers.{n}",),
    "qwen3": ("model.layers.{n}",),
    "t5": ("encoder.block.{n}", "decoder.block.{n}"),
    "vit": ("vit.layers.{n}",),
}
NORMS = {
    "bert": "bert.encoder.layer.{n}.output.LayerNorm",
    "gpt2": "transformer.h.{n}.ln_1",
    "llama": "model.layers.{n}.input_layernorm",
    "qwen3": "model.layers.{n}.post_attention_layernorm",
    "t5": "encoder.block.{n}.layer.1.layer_norm",
    "vit": "vit.layers.{n}.layernorm_before",
}
ACTIVATIONS = {
    "bert": "bert.encoder.layer.{n}.intermediate.intermediate_act_fn",
    "gpt2": "transformer.h.{n}.mlp.act",
    "llama": "model.layers.{n}.mlp.act_fn",
    "qwen3": "model.layers.{n}.mlp.act_fn",
    "t5": "decoder.block.{n}.layer.2.DenseReluDense.act",
    "vit": "vit.layers.{n}.mlp.activation_fn",
}
DROPOUTS = {
    "bert": "bert.encoder.layer.{n}.output.dropout",
    "gpt2": "transformer.h.{n}.mlp.dropout",
    "t5": "decoder.block.{n}.layer.0.dropout",
    "vit": "vit.layers.{n}.dropout",
}
ATTENTIONS = {
    "bert": "bert.encoder.layer.{n}.attention.self",
    "gpt2": "transformer.h.{n}.attn",
    "llama": "model.layers.{n}.self_attn",
    "qwen3": "model.layers.{n}.self_attn",
    "t5": "encoder.block.{n}.layer.0.SelfAttention",
    "vit": "vit.layers.{n}.attention",
}
MLPS = {
    "bert": "bert.encoder.layer.{n}.intermediate",
    "gpt2": "transformer.h.{n}.mlp",
    "llama": "model.layers.{n}.mlp",
    "qwen3": "model.layers.{n}.mlp",
    "t5": "encoder.block.{n}.layer.1.DenseReluDense",
    "vit": "vit.layers.{n}.mlp",
}
HEADS = {  # a linear layer in front of the output
    "bert": "cls.predictions.transform.dense",
    "gpt2": "lm_head",
    "llama": "lm_head",
    "qwen3": "lm_head",
    "t5": "lm_head",
    "vit": "classifier",
}
SQUARES = {  # a linear layer with as many outputs as inputs
    "bert": "cls.predictions.transform.dense",
    "llama": "model.layers.{n}.mlp.act_fn",
    "gpt2": "transformer.h.{n}.attn.c_proj",
    "vit": "vit.layers.{n}.attention.o_proj",
}
