"""Tensor parallelism, kernels and checkpointing of one model, one after the other in every order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
IDS = torch.arange(32).reshape(2, 16) * 5 % 96
BATCH = {"input_ids": IDS, "labels": IDS.flip(1)}


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(**SIZES, num_hidden_layers=1, max_position_embeddings=32, attn_implementation="eager")
    return BertForMaskedLM(config)  # type: ignore[no-any-return]


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES, num_hidden_layers=1, num_key_value_heads=2, attn_implementation="eager", use_cache=False
    )
    return LlamaForCausalLM(config)  # type: ignore[no-any-return]


def split_bert(layer: Any) -> None:
    attention = layer["attention.self"]
    for name in ("query", "key", "value"):
        attention[name].shard(["weight", "bias"], axis=0)
    attention.sync("bwd_post", "all_reduce")
    layer["attention.output.dense"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    layer["intermediate.dense"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    layer["output.dense"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def split_llama(layer: Any) -> None:
    attention, mlp = layer["self_attn"], layer["mlp"]
    for name in ("q_proj", "k_proj", "v_proj"):
        attention[name].shard("weight", axis=0)
    attention.sync("bwd_post", "all_reduce")
    attention["o_proj"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    for name in ("gate_proj", "up_proj"):
        mlp[name].shard("weight", axis=0)
    mlp.sync("bwd_post", "all_reduce")
    mlp["down_proj"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def kernels_bert(layer: Any) -> None:
    layer.trace(flatten=True)
    layer.replace(match="fusion.sdpa")
    layer.fuse("fusion.bias_gelu", compiler="eager")
    layer.fuse("fusion.bias_dropout_add_norm", compiler="eager")


def kernels_of_decomposed_bert(layer: Any) -> None:
    for name in ("intermediate.dense", "attention.output.dense", "output.dense"):
        layer[name].decompose()
    kernels_bert(layer)


def kernels_llama(layer: Any) -> None:
    layer.trace(flatten=True)
    layer.replace(match="fusion.sdpa")
    layer.replace(match="fusion.rms_norm")


FAMILIES: dict[str, tuple[Callable[[], nn.Module], str, dict[str, Callable[[Any], Any]]]] = {
    "bert": (bert, "bert.encoder.layer.0", {"tp": split_bert, "kernels": kernels_bert}),
    "bert, decomposed": (
        bert,
        "bert.encoder.layer.0",
        {"tp": split_bert, "kernels": kernels_of_decomposed_bert},
    ),
    "llama": (llama, "model.layers.0", {"tp": split_llama, "kernels": kernels_llama}),
}
ORDERS = list(itertools.permutations(("tp", "kernels", "checkpoint")))
SAMPLE = [("bert", ORDERS[2])]  # kernels first


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("family", "order"),
    [
        pytest.param(family, order, marks=() if (family, order) in SAMPLE else pytest.mark.breadth)
        for family in FAMILIES
        for order in ORDERS
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value),
)
def test_every_order_is_verified_and_replayed(family: str, order: tuple[str, ...]) -> None:
    make, path, steps = FAMILIES[family]
    schedule = slapo.create_schedule(make(), mesh={"tp": 2}, example_inputs=BATCH)
    layer = schedule[path]
    for each in order:
        if each == "checkpoint":
            layer.checkpoint()
        else:
            steps[each](layer)
    slapo.verify(schedule, optimizer_steps=1)
    again = slapo.replay(make(), schedule.to_json(), example_inputs=BATCH)
    assert [str(record) for record in again.records] == [str(record) for record in schedule.records]
    assert str(again[path].graph) == str(layer.graph)
    schedule.undo(to=0)
    assert "forward" not in schedule[path].module.__dict__
    assert schedule.records == ()


@pytest.mark.breadth
@pytest.mark.ranks
def test_estimate_attributes_collectives_of_graphs_to_the_modules_and_steps_they_came_from() -> None:
    make, path, steps = FAMILIES["bert"]
    found = []
    for order in (("tp",), ("kernels", "tp")):
        schedule = slapo.create_schedule(make(), mesh={"tp": 2}, example_inputs=BATCH)
        for each in order:
            steps[each](schedule[path])
        collectives = slapo.estimate(schedule, BATCH).kinds[0].collectives
        found.append(
            [
                (one.module, one.phase, one.bytes, one.record.partition(" ")[2].partition(" at")[0])
                for one in collectives
            ]
        )
    assert found[0] == found[1]
    assert [module.removeprefix(f"{path}.") for module, *_ in found[1]] == [
        "attention.output.dense",
        "output.dense",
        "intermediate.dense",
        "attention.self",
    ]
    assert all("all_reduce" in record for *_, record in found[1])


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4}
    return T5ForConditionalGeneration(  # type: ignore[no-any-return]
        T5Config(**sizes, num_layers=2, decoder_start_token_id=0, attn_implementation="eager", use_cache=False)
    )


def split_t5(schedule: Any) -> None:
    for stack in ("encoder", "decoder"):
        schedule[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"].shard("weight", axis=1)
    for attention in schedule["*.block.*.layer.*.*Attention"]:
        for name in ("q", "k", "v"):
            attention[name].shard("weight", axis=0)
        attention["o"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        attention.shard_attribute("n_heads")
        attention.fork_rng()
        inputs = (
            ("hidden_states",) if attention.path.endswith("SelfAttention") else ("hidden_states", "key_value_states")
        )
        attention.sync("bwd_post", "all_reduce", inputs=inputs)


def kernels_t5(schedule: Any) -> None:
    for group in ("encoder.block.*", "decoder.block.*"):
        schedule[group].trace(flatten=True)
        schedule[group].replace(match="fusion.sdpa")
        schedule[group].replace(match="fusion.rms_norm")


@pytest.mark.ranks
@pytest.mark.breadth
@pytest.mark.parametrize("steps", [(split_t5, kernels_t5), (kernels_t5, split_t5)])
def test_blocks_of_t5_are_traced_from_one_batch_with_the_bias_of_this_rank_s_heads(steps: Any) -> None:
    batch = {"input_ids": IDS, "labels": IDS[:, :8].clone()}
    schedule = slapo.create_schedule(t5(), mesh={"tp": 2}, example_inputs=batch)
    for step in steps:
        step(schedule)
    assert len(schedule.find("softmax")) == 0
    slapo.verify(schedule, optimizer_steps=1)
    assert len(slapo.estimate(schedule).kinds[0].collectives) >= 5  # forward: an attention each
    again = slapo.replay(t5(), schedule.to_json(), example_inputs=batch)
    assert [str(record) for record in again.records] == [str(record) for record in schedule.records]
    for path in ("encoder.block.1", "decoder.block.1"):
        assert "all_reduce" in str(schedule[path].graph)
        assert "fork = fork(" in str(schedule[path].graph)
