"""Blocks of real models, rewritten: outputs, gradients, optimiser steps and ties as in the untouched model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slapo_core as slapo
from slapo_core import patterns

SMALL = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SMALL, max_position_embeddings=16))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=48, n_embd=16, n_layer=2, n_head=2, n_positions=16, use_cache=False))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=1, tie_word_embeddings=True, use_cache=False))


def dense_gelu(x: Any, weight: Any, bias: Any) -> Any:
    return F.gelu(F.linear(x, weight, bias))


def residual_norm(x: Any, y: Any) -> Any:
    return patterns.call_module("LayerNorm", patterns.call_module("dropout", x) + y)


def gated(x: Any, gate: Any, up: Any) -> Any:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def schedule_bert(schedule: slapo.Schedule) -> None:
    layers: Any = schedule["bert.encoder.layer.*"]
    layers["intermediate"].trace(flatten=True)
    layers["intermediate"].replace(dense_gelu, dense_gelu)
    layers["output"].trace()
    layers["output"].checkpoint(residual_norm)
    layers["attention.self"].trace()
    layers["attention.self"].merge(("query", "key", "value"))


def schedule_gpt2(schedule: slapo.Schedule) -> None:
    layers: Any = schedule["transformer.h.*"]
    layers["mlp"].trace(flatten=True)
    layers["mlp"].checkpoint("*dropout*")
    layers["mlp"].checkpoint(lambda x: x * 0.5)


def schedule_llama(schedule: slapo.Schedule) -> None:
    layers: Any = schedule["model.layers.*"]
    layers["mlp"].trace(flatten=True)
    layers["mlp"].checkpoint(gated)
    layers["self_attn"].trace()
    layers["self_attn"].merge(("q_proj", "k_proj", "v_proj"), name="qkv_proj")
    layers.checkpoint()


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_a_rewritten_model_is_the_untouched_one(name: str) -> None:
    torch.manual_seed(0)
    model = {"bert": bert, "gpt2": gpt2, "llama": llama}[name]()
    untouched = copy.deepcopy(model)
    tokens = torch.arange(14).reshape(2, 7)
    schedule = slapo.create_schedule(model, example_inputs={"input_ids": tokens})
    apply = {"bert": schedule_bert, "gpt2": schedule_gpt2, "llama": schedule_llama}[name]
    apply(schedule)
    slapo.verify(schedule, {"input_ids": tokens, "labels": tokens})
    for batch in (tokens[:1], torch.arange(15).reshape(3, 5), tokens):
        for training in (True, False):
            results = []
            for each in (model, untouched):
                each.train(training).zero_grad()
                torch.manual_seed(1)
                out: Any = each(input_ids=batch, labels=batch)
                out.loss.backward()
                results.append(out.logits)
            torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    engine = slapo.build(schedule)
    assert list(engine.state_dict()) == list(untouched.state_dict())
    for key, tensor in untouched.state_dict().items():
        assert torch.equal(engine.state_dict()[key], tensor), key


def test_a_saved_schedule_is_replayed() -> None:
    torch.manual_seed(0)
    model = bert()
    untouched = copy.deepcopy(model)
    tokens = {"input_ids": torch.arange(14).reshape(2, 7)}
    schedule = slapo.create_schedule(model, example_inputs=tokens)
    schedule_bert(schedule)
    again = slapo.replay(untouched, schedule.to_json(), example_inputs=tokens)
    assert [str(record) for record in again.records] == [str(record) for record in schedule.records]
    slapo.verify(again, tokens)
