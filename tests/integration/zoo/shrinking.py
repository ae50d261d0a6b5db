"""Make a transformers configuration tiny, by the names that its fields share with those of other architectures."""

from __future__ import annotations

from typing import Any

__all__ = ["shrunk"]

HIDDEN, HEADS, LAYERS, INNER, VOCABULARY, IMAGE, PATCH, POSITIONS = 32, 4, 2, 64, 96, 32, 8, 64

_HIDDEN = (
    "hidden_size d_model n_embd dim embed_dim hidden_dim model_dim encoder_hidden_size decoder_hidden_size "
    "projection_dim "
    "hidden_channels out_hidden_size proj_dim emb_dim d_embed feature_size conv_dim encoder_dim decoder_dim "
    "text_embed_dim projector_hidden_size lm_embed_dim hidden_act_dim embedding_hidden_size embedding_size block_dim "
    "classifier_proj_size encoder_width attention_hidden_size width lru_width q_hidden_size"
)
_HEADS = (
    "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads "
    "encoder_num_attention_heads decoder_num_attention_heads num_attn_heads nhead"
)
_LAYERS = (
    "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers "
    "depth encoder_num_hidden_layers decoder_num_hidden_layers num_blocks"
)
_INNER = (
    "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner ffn_hidden_size mlp_dim d_inner "
    "moe_intermediate_size shared_expert_intermediate_size encoder_intermediate_size decoder_intermediate_size "
    "feed_forward_size inner_dim expert_ffn_hidden_size moe_shared_expert_intermediate_size shared_intermediate_size "
    "ffn_intermediate_size intermediate_size_mlp mamba_d_inner"
)
_TABLE: dict[str, int] = {
    **dict.fromkeys(_HIDDEN.split(), HIDDEN),
    **dict.fromkeys(_HEADS.split(), HEADS),
    **dict.fromkeys(_LAYERS.split(), LAYERS),
    **dict.fromkeys(_INNER.split(), INNER),
    **dict.fromkeys(["num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"], 2),
    **dict.fromkeys(["head_dim", "d_kv", "d_head", "dim_head", "attention_head_dim", "v_head_dim", "kv_channels"], 8),
    **dict.fromkeys(["qk_nope_head_dim", "qk_rope_head_dim", "rotary_dim"], 4),
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank", "rank", "dt_rank", "time_step_rank"], 16),
    **dict.fromkeys(
        ["vocab_size", "encoder_vocab_size", "decoder_vocab_size", "vocab_size_or_config_json_file"], VOCABULARY
    ),
    **dict.fromkeys(
        ["max_position_embeddings", "n_positions", "n_ctx", "max_source_positions", "max_target_positions"], POSITIONS
    ),
    **dict.fromkeys(
        ["max_seq_len", "max_sequence_length", "seq_length", "max_seq_length", "block_size", "context_length"],
        POSITIONS,
    ),
    **dict.fromkeys(["sliding_window", "attention_window", "local_attention"], 16),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(
        ["num_experts_per_tok", "num_selected_experts", "moe_k", "moe_topk", "top_k", "n_group", "topk_group"], 2
    ),
    **dict.fromkeys(["image_size", "img_size", "input_size"], IMAGE),
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "patch_size": PATCH,
    "num_mel_bins": 16,
    "num_codebooks": 2,
    "codebook_size": 16,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "type_vocab_size": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "mamba_num_heads": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_head_dim": 8,
    "mamba_d_state": 8,
    "state_size": 8,
    "ssm_state_size": 8,
    "conv_kernel_size": 5,
    "chunk_size": 8,
    "num_queries": 5,
    "num_query_tokens": 4,
}
_HYBRID = {"layer_types", "layers_block_type", "mlp_layer_types", "block_types", "hybrid_override_pattern"}
_WIDTHS = {"hidden_sizes", "embed_dims", "encoder_hidden_sizes", "hidden_dims", "embed_dim"}
_DEPTHS = {"depths", "depth"}


def shrunk(cls: type, **changes: Any) -> Any:
    """A tiny configuration of a class.

    Args:
        cls: a ``PretrainedConfig`` with defaults for everything.
        changes: fields that have to have these values.
    """
    default = cls()
    fields = default.to_dict()
    arguments: dict[str, Any] = {}
    for name in getattr(cls, "sub_configs", None) or {}:
        present = getattr(default, name, None)
        if hasattr(present, "to_dict"):
            arguments[name] = shrunk(type(present))
    for name, value in fields.items():
        if name not in arguments and (small := _small(name, value)) is not None:
            arguments[name] = small
    if "qk_rope_head_dim" in fields:
        arguments.pop("head_dim", None)  # it follows from the others
    if any(isinstance(arguments.get(name), list) for name in _WIDTHS):
        arguments.pop("hidden_size", None)  # it is the last stage's
    for alias, name in dict(getattr(cls, "attribute_map", None) or {}).items():  # "hidden_size" stands for "d_model"
        if name not in arguments and alias in _TABLE and isinstance(fields.get(name), int):
            arguments[name] = _TABLE[alias]
    return cls(**{**arguments, **changes})


def _small(name: str, value: Any) -> Any:
    """The tiny value of a field; None leaves its default."""
    if isinstance(value, bool) or name in ("id2label", "label2id"):
        return None
    if isinstance(value, int) and name in _TABLE:
        # A token id only where the model has such a token; sizes only downwards.
        return _TABLE[name] if name.endswith("token_id") else min(value, _TABLE[name])
    if isinstance(value, int) and name.endswith("token_id") and value >= VOCABULARY:
        return VOCABULARY - 1
    if isinstance(value, int) and name.endswith("_layers") and "feat_extract" not in name and value > LAYERS:
        return LAYERS
    if name in _HYBRID and isinstance(value, list) and value:
        return _both_kinds(value)
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, int) for item in value):
        if name in _WIDTHS:
            return [8 * 2**stage for stage in range(len(value))]
        if name in _DEPTHS:
            return [min(item, 2) for item in value]
    if isinstance(value, dict) and "mrope_section" in value:
        return {**value, "mrope_section": [2, 1, 1]}
    if isinstance(value, (list, tuple)) and name in ("image_size", "patch_size", "img_size"):
        return type(value)([_TABLE[name]] * len(value))
    return None


def _both_kinds(kinds: list[Any]) -> list[Any]:
    """Two layers, of two kinds where the model has two."""
    first = kinds[0]
    return [first, next((kind for kind in kinds if kind != first), first)]
