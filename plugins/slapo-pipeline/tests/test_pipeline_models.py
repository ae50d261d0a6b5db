"""Stages of transformers models, run in turn, compute what the untouched model computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from .staging import compare

transformers = pytest.importorskip("transformers")


def gpt2() -> tuple[nn.Module, list[str], dict[str, Any]]:
    config = transformers.GPT2Config(
        n_layer=3, n_embd=16, n_head=2, vocab_size=64, n_positions=32, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), ["transformer.h.0", "transformer.h.1"], {}


def bert() -> tuple[nn.Module, list[str], dict[str, Any]]:
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, vocab_size=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    return (
        transformers.BertForMaskedLM(config),
        ["bert.encoder.layer.0", "bert.encoder.layer.1"],
        {"attention_mask": mask},
    )


def t5() -> tuple[nn.Module, list[str], dict[str, Any]]:
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=2, num_heads=2,
        decoder_start_token_id=0, use_cache=False, dropout_rate=0.0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), ["encoder.block.0", "decoder.block.0"], {}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("make", [gpt2, bert, t5])
def test_stages_in_turn_are_the_untouched_model(make: Any, train: bool) -> None:
    torch.manual_seed(0)
    model, cuts, batch = make()
    ids = torch.randint(0, 64, (2, 5))
    made = compare(
        model.double().train(train), cuts, loss=lambda out: out.loss, input_ids=ids, labels=ids.clone(), **batch
    )
    assert len(made.partition.stages) == 3
