"""Six tiny models with odd sizes, and batches for them in several forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["MODELS", "batch_of", "make_model"]

LENGTH = 6


def bert(dropout: float = 0.0, tied: bool = True) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=44, hidden_size=20, num_hidden_layers=2, num_attention_heads=4, intermediate_size=28,
            max_position_embeddings=14, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
            tie_word_embeddings=tied, attn_implementation="eager",
        )
    )  # fmt: skip


def gpt2(dropout: float = 0.0, tied: bool = True) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=44, n_embd=20, n_layer=2, n_head=4, n_inner=28, n_positions=14, use_cache=False,
            attn_pdrop=0.0, resid_pdrop=dropout, embd_pdrop=dropout, tie_word_embeddings=tied,
            bos_token_id=1, eos_token_id=2, attn_implementation="eager",
        )
    )  # fmt: skip


def llama(dropout: float = 0.0, tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=44, hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=4, head_dim=6, max_position_embeddings=14, attention_dropout=dropout, use_cache=False,
            tie_word_embeddings=tied, attn_implementation="eager",
        )
    )  # fmt: skip


def qwen3(dropout: float = 0.0, tied: bool = False) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=44, hidden_size=20, intermediate_size=36, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=4, head_dim=6, max_position_embeddings=14, attention_dropout=dropout, use_cache=False,
            tie_word_embeddings=tied, attn_implementation="eager",
        )
    )  # fmt: skip


def t5(dropout: float = 0.0, tied: bool = True) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=44, d_model=20, d_kv=6, d_ff=28, num_layers=2, num_decoder_layers=2, num_heads=4,
            relative_attention_num_buckets=8, relative_attention_max_distance=16, dropout_rate=dropout,
            use_cache=False, tie_word_embeddings=tied, attn_implementation="eager", decoder_start_token_id=0,
        )
    )  # fmt: skip


def vit(dropout: float = 0.0, tied: bool = False) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=20, num_hidden_layers=2, num_attention_heads=4, intermediate_size=28, image_size=12,
            patch_size=4, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=8,
            attn_implementation="eager",
        )
    )  # fmt: skip


MODELS: dict[str, Callable[..., nn.Module]] = {
    "bert": bert, "gpt2": gpt2, "llama": llama, "qwen3": qwen3, "t5": t5, "vit": vit,
}  # fmt: skip


def make_model(
    name: str,
    *,
    dtype: str = "float32",
    seed: int = 0,
    prepare: Callable[[nn.Module], None] | None = None,
    **options: Any,
) -> nn.Module:
    """A fresh instance in training mode, the same each time; biases and norms get values that are not trivial.

    Args:
        name: of :data:`MODELS`.
        dtype: of its parameters.
        seed: of its values.
        prepare: what its author does to it before it is scheduled, e.g. freeze a part.
        options: of the function that makes it.
    """
    torch.manual_seed(seed)
    model = MODELS[name](**options)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # a bias that is zero hides that it is lost, and a norm of ones its weight
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
            else:
                parameter.mul_(1.0 if name == "t5" else 6.0)  # an attention that is not flat; T5's is not as it is made
    model = model.to(getattr(torch, dtype)).train()
    if prepare is not None:
        prepare(model)
    return model


def batch_of(name: str, form: str = "labels", *, dtype: str = "float32", size: int = 2) -> Any:
    """One batch, always the same.

    Args:
        name: of the model.
        form: ``"ids"`` (positional), ``"labels"``, or ``"mask"`` (with labels and an attention mask).
        dtype: of pictures.
        size: how many sequences or pictures.
    """
    generator = torch.Generator().manual_seed(11)
    if name == "vit":
        pictures = torch.randn(size, 3, 12, 12, generator=generator).to(getattr(torch, dtype))
        if form == "ids":
            return (pictures,)
        return {"pixel_values": pictures, "labels": torch.arange(size) % 8}
    ids = torch.randint(3, 44, (size, LENGTH), generator=generator)
    ids[0, 0] = 3
    ids[-1, -1] = 43  # both ends of the vocabulary
    if name == "t5":
        given = {"input_ids": ids, "decoder_input_ids": ids.flip(1)[:, :4].clone()}
        if form in ("labels", "mask"):
            given["labels"] = ids[:, 1:5].clone()
    elif form == "ids":
        return (ids,)
    else:
        given = {"input_ids": ids, "labels": ids.clone()}
    if form == "mask":
        mask = torch.ones_like(ids)
        mask[-1, -2:] = 0
        given["attention_mask"] = mask
    return given
