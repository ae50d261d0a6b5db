"""Layers of real model families, split over two processes, against the same layers untouched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_testing import preload_modules, run_ranks

from .checks import differs_from_untouched, rand, same_as_untouched

pytestmark = pytest.mark.ranks
preload_modules("transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2")
preload_modules("transformers.models.llama.modeling_llama")


def bert_config() -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24,
        max_position_embeddings=12, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def bert_layer() -> nn.Module:
    from transformers.models.bert.modeling_bert import BertLayer

    config = bert_config()
    config._attn_implementation = "eager"
    return BertLayer(config)


def split_bert_layer(layer: Any) -> None:
    attention = layer["attention.self"]
    for name in ("query", "key", "value"):
        attention[name].shard(["weight", "bias"], axis=0)
    attention.sync("bwd_post", "all_reduce").shard_attribute(["num_attention_heads", "all_head_size"])
    layer["attention.output.dense"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    layer["intermediate.dense"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    layer["output.dense"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def bert_for_masked_lm() -> nn.Module:
    from transformers import BertForMaskedLM

    return BertForMaskedLM(bert_config())


def split_bert_and_its_vocabulary(sch: slapo.Schedule) -> None:
    for layer in sch["bert.encoder.layer.*"]:
        split_bert_layer(layer)
        layer.checkpoint()
    sch["cls.predictions"].shard("bias", axis=0)
    sch["cls.predictions.decoder"].shard("weight", axis=0).sync("backward").sync("forward")
    sch["bert.embeddings.word_embeddings"].sync("forward")


def check_bert() -> None:
    same_as_untouched(bert_layer, lambda sch: split_bert_layer(sch.root), (rand(2, 5, 16),))
    ids = torch.randint(0, 40, (2, 7), generator=torch.Generator().manual_seed(3))
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, 4:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    sch = same_as_untouched(bert_for_masked_lm, split_bert_and_its_vocabulary, kwargs=inputs)
    decoder, words = sch["cls.predictions.decoder"].module, sch["bert.embeddings.word_embeddings"].module
    assert decoder.weight is words.weight
    assert decoder.bias is sch["cls.predictions"].module.bias
    assert (decoder.out_features, decoder.in_features) == (20, 16)
    assert (words.num_embeddings, words.embedding_dim) == (20, 16)


def test_bert_with_checkpointed_layers_and_a_tied_split_vocabulary_is_the_untouched_bert() -> None:
    run_ranks(check_bert, world_size=2)


def gpt2_block() -> nn.Module:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = GPT2Config(n_embd=16, n_head=4, n_inner=24, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    config._attn_implementation = "eager"
    return GPT2Block(config)


def split_gpt2_block(sch: Any, *, packed: int = 3) -> None:
    sch["attn.c_attn"].shard(["weight", "bias"], axis=1, packed=packed).sync("backward")
    sch["attn"].shard_attribute(["num_heads", "embed_dim", "split_size"])
    sch["attn.c_proj"].shard("weight", axis=0).sync("forward")
    sch["mlp.c_fc"].shard(["weight", "bias"], axis=1).sync("backward")
    sch["mlp.c_proj"].shard("weight", axis=0).sync("forward")


def check_gpt2() -> None:
    sch = same_as_untouched(gpt2_block, split_gpt2_block, (rand(2, 5, 16),))
    assert (sch["attn.c_attn"].module.nf, sch["attn.c_attn"].module.nx) == (24, 16)
    assert (sch["attn.c_proj"].module.nf, sch["attn.c_proj"].module.nx) == (16, 8)
    differs_from_untouched(gpt2_block, lambda sch: split_gpt2_block(sch, packed=1), (rand(2, 5, 16),))


def test_a_gpt2_block_with_its_packed_attention_weight_is_the_untouched_block() -> None:
    run_ranks(check_gpt2, world_size=2)


def llama_layer() -> nn.Module:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = LlamaConfig(hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2)
    config._attn_implementation = "eager"
    return LlamaDecoderLayer(config, layer_idx=0)


def split_llama_layer(sch: Any) -> None:
    for name in ("q_proj", "k_proj", "v_proj"):
        sch[f"self_attn.{name}"].shard("weight", axis=0)
    # The attention is called by keywords, with rotary tables that every rank has whole.
    sch["self_attn"].sync("bwd_post", "all_reduce", inputs=("hidden_states",))
    sch["self_attn.o_proj"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    for name in ("gate_proj", "up_proj"):
        sch[f"mlp.{name}"].shard("weight", axis=0)
    sch["mlp"].sync("bwd_post", "all_reduce")
    sch["mlp.down_proj"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


class RotaryInside(nn.Module):
    """A LLaMA layer with the rotary tables that the model would hand it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = llama_layer()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(hidden_states.shape[1] * 4, dtype=hidden_states.dtype).view(1, -1, 4)
        return self.layer(hidden_states, position_embeddings=(angles.cos(), angles.sin()))


def check_llama() -> None:
    same_as_untouched(RotaryInside, lambda sch: split_llama_layer(sch["layer"]), (rand(2, 5, 16),))


def test_a_llama_layer_with_grouped_queries_is_the_untouched_layer() -> None:
    run_ranks(check_llama, world_size=2)
