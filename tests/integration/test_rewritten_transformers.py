"""Blocks of real models, rewritten: outputs, gradients, optimizer steps and ties as in the reference model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slapo_core as slapo
from slapo_graph import patterns

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


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 48, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, use_cache=False))


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
def test_a_rewritten_model_is_the_reference_one(name: str) -> None:
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


KERNELS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {  # blocks, replaced, fused
    "bert": (("bert.encoder.layer.*",), ("fusion.sdpa",), ("fusion.bias_gelu", "fusion.bias_dropout_add_norm")),
    "gpt2": (("transformer.h.*",), ("fusion.sdpa",), ()),
    "llama": (("model.layers.*",), ("fusion.sdpa", "fusion.rms_norm"), ("fusion.swiglu",)),
    "t5": (("encoder.block.*", "decoder.block.*"), ("fusion.sdpa", "fusion.rms_norm"), ()),
}
TOKENS = torch.arange(1, 15).reshape(2, 7) * 5 % 47 + 1


def variants_of(name: str) -> dict[str, dict[str, Any]]:
    """Batches in which a trained and evaluated model differs: sizes, labels, masks, outputs, types."""
    plain = {"input_ids": TOKENS}
    decoded = {"decoder_input_ids": TOKENS.flip(1)} if name == "t5" else {}
    mask = torch.ones_like(TOKENS)
    padded = torch.cat([mask[:, :4], mask[:, 4:] * torch.tensor([[1], [0]])], 1)
    lengths = (7, 5) if name == "t5" else (7, 7)
    found = {
        "plain": {**plain, **decoded},
        "labels": {**plain, "labels": TOKENS.flip(1)},
        "a mask of ones": {**plain, **decoded, "attention_mask": mask},
        "padded, labels": {**plain, "labels": TOKENS.flip(1)[:, : lengths[1]].clone(), "attention_mask": padded},
        "a tuple": {**plain, **decoded, "return_dict": False},
    }
    for label, rows, length in (("three short rows", 3, 4), ("one token", 1, 1)):
        found[label] = {key: value.repeat(2, 1)[:rows, :length].contiguous() for key, value in found["plain"].items()}
    return found


def outcome(model: nn.Module, batch: dict[str, Any], training: bool) -> list[Any]:
    """Logits, the loss if there is one, and every gradient."""
    model.train(training).zero_grad()
    torch.manual_seed(1)
    out: Any = model(**batch)
    if isinstance(out, tuple):
        out = {"logits": out[0]}
    loss = out["loss"] if "labels" in batch else out["logits"].square().mean()
    loss.backward()
    return [out["logits"], loss, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("first", ["plain", pytest.param("padded, labels", marks=pytest.mark.breadth)])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_hold_in_every_variant_of_the_graph_with_its_dropout(name: str, first: str) -> None:
    torch.manual_seed(0)
    model = {"bert": bert, "gpt2": gpt2, "llama": llama, "t5": t5}[name]().double()
    model.set_attn_implementation("eager")  # type: ignore[operator]
    untouched, batches = copy.deepcopy(model), variants_of(name)
    schedule: Any = slapo.create_schedule(model, example_inputs=batches[first])
    groups, replaced, fused = KERNELS[name]
    for group in groups:
        schedule[group].trace(flatten=True)
        for pattern in replaced:
            schedule[group].replace(match=pattern)
        for pattern in fused:
            schedule[group].fuse(pattern, compiler="eager")
    # In float64 equal but for the order of sums; norms and rotations compute in float32, in both.
    close = {"rtol": 1e-9, "atol": 1e-12} if name in ("bert", "gpt2") else {"rtol": 1e-4, "atol": 1e-6}
    for label, batch in batches.items():
        for training in (True, False):
            results = [outcome(each, batch, training) for each in (model, untouched)]
            torch.testing.assert_close(*results, **close, msg=lambda text, at=(label, training): f"{at}: {text}")
    for group in groups:
        for layer in schedule[group]:
            assert len(layer.graph.variants) >= 2
            for variant in layer.graph.variants:
                called = [getattr(node.target, "__name__", "") for node in variant.recorded.graph.nodes]
                assert "softmax" not in called
                assert "scaled_dot_product_attention" in called or "attention" in called
    with pytest.raises(slapo.TraceError, match=r"the rewrite 'sdpa' of .* cannot be repeated"):
        model(**batches["plain"], output_attentions=True)  # which no kernel gives: refused, and not left out
