"""Stages of transformers models, run in turn, compute what the reference model computes."""

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
def test_stages_in_turn_are_the_reference_model(make: Any, train: bool) -> None:
    torch.manual_seed(0)
    model, cuts, batch = make()
    ids = torch.randint(0, 64, (2, 5))
    made = compare(
        model.double().train(train), cuts, loss=lambda out: out.loss, input_ids=ids, labels=ids.clone(), **batch
    )
    assert len(made.partition.stages) == 3


@pytest.mark.parametrize("make", [gpt2, bert, t5])
def test_hidden_states_of_several_stages(make: Any) -> None:
    torch.manual_seed(0)
    model, cuts, batch = make()
    batch["input_ids"] = torch.randint(0, 64, (2, 5))
    batch["output_hidden_states"] = True
    if make is t5:
        batch["decoder_input_ids"] = batch["input_ids"]
    made = compare(model.double(), cuts, **batch)  # transformers installs hooks when they are first needed
    named = made.partition.output.assemble({name: name for name in made.partition.output.names})
    states = named.decoder_hidden_states if make is t5 else named.hidden_states
    makers = {made.partition.values[name].producer for name in states}
    assert len(makers) > 1, f"the hidden states come from the stages {makers}"


def test_a_cnn_with_batch_norm() -> None:
    torch.manual_seed(0)
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], num_labels=3)
    model = transformers.ResNetForImageClassification(config).double()
    cuts = ["resnet.encoder.stages.0.layers.0", "resnet.encoder.stages.1"]
    pixels = torch.rand(3, 3, 16, 16, dtype=torch.float64)
    labels = torch.tensor([0, 2, 1])
    made = compare(model, cuts, loss=lambda out: out.loss, pixel_values=pixels, labels=labels)
    assert [stage.last for stage in made.partition.stages] == [*cuts, None]
