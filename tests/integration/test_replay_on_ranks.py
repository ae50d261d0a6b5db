"""A saved schedule replays on a fresh model at any world size, with the same records and the same gradients."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

import slapo_core as slapo
from slapo_testing import run_ranks


def bert() -> torch.nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config).double()


def gpt2() -> torch.nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0
    )
    config.use_cache = False
    return GPT2LMHeadModel(config).double()


def schedule_bert(sch: slapo.Schedule) -> None:
    for layer in sch["bert.encoder.layer.*"]:
        for name in ("query", "key", "value"):
            layer[f"attention.self.{name}"].shard(["weight", "bias"], axis=0)
        layer["attention.self"].sync("bwd_post", "all_reduce")
        layer["attention.output.dense"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        layer["intermediate.dense"].shard(["weight", "bias"], axis=0).sync("backward")
        layer["output.dense"].shard("weight", axis=1).sync("forward")
    sch["bert.encoder.layer.0"].checkpoint()


def schedule_gpt2(sch: slapo.Schedule) -> None:
    for block in sch["transformer.h.*"]:
        block["attn.c_attn"].shard(["weight", "bias"], axis=1, packed=3).sync("bwd_post", "all_reduce")
        block["attn"].shard_attribute(["num_heads", "embed_dim", "split_size"])
        block["attn.c_proj"].shard("weight", axis=0).sync("fwd_post", "all_reduce")
        block["mlp.c_fc"].shard(["weight", "bias"], axis=1).sync("bwd_post", "all_reduce")
        block["mlp.c_proj"].shard("weight", axis=0).sync("fwd_post", "all_reduce")
    sch["transformer.h.1"].checkpoint()


MODELS = {"bert": (bert, schedule_bert), "gpt2": (gpt2, schedule_gpt2)}


def replayed_gradients(name: str, document: str, world_size: int) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Replay on this rank; the records, and every gradient in the reference layout."""
    model = MODELS[name][0]()
    sch = slapo.replay(model, document, mesh={"tp": world_size})
    ids = torch.arange(24).view(2, 12) % 64
    model(input_ids=ids, labels=ids).loss.backward()
    gradients = {}
    for parameter_name, parameter in model.named_parameters():
        path, _, own_name = parameter_name.rpartition(".")
        layout = sch[path].layout(own_name)
        gradients[layout.origin] = layout.full(parameter.grad, sch.mesh)
    return [f"{record} {record.distribution} {record.location}" for record in sch.records], gradients


@pytest.mark.ranks
@pytest.mark.parametrize("name", list(MODELS))
def test_a_saved_schedule_gives_the_same_records_and_gradients_at_world_size_1_and_2(name: str) -> None:
    make, schedule = MODELS[name]
    sch = slapo.create_schedule(make(), mesh={"tp": 2})
    schedule(sch)
    document = sch.to_json()
    expected_records = [f"{record} {record.distribution} {record.location}" for record in sch.records]

    plain = make()
    ids = torch.arange(24).view(2, 12) % 64
    plain(input_ids=ids, labels=ids).loss.backward()
    expected = {key: parameter.grad for key, parameter in plain.named_parameters()}

    alone = replayed_gradients(name, document, 1)
    both = run_ranks(replayed_gradients, name, document, 2, world_size=2)
    for records, gradients in (alone, *both):
        assert records == expected_records
        assert gradients.keys() == expected.keys()
        for key, gradient in gradients.items():
            torch.testing.assert_close(
                gradient, expected[key], rtol=1e-10, atol=1e-13, msg=lambda m, k=key: f"{k}: {m}"
            )


@pytest.mark.ranks
def test_a_schedule_without_one_sync_gives_other_gradients() -> None:
    """The control: the comparison above would notice."""
    sch = slapo.create_schedule(bert(), mesh={"tp": 2})
    schedule_bert(sch)
    document = json.loads(sch.to_json())
    document["records"] = [
        record
        for record in document["records"]
        if not (record["path"] == "bert.encoder.layer.0.attention.self" and record["primitive"] == "tp.sync")
    ]
    plain = bert()
    ids = torch.arange(24).view(2, 12) % 64
    plain(input_ids=ids, labels=ids).loss.backward()
    expected = plain.get_parameter("bert.embeddings.word_embeddings.weight").grad
    _, gradients = run_ranks(replayed_gradients, "bert", json.dumps(document), 2, world_size=2)[0]
    assert not torch.allclose(gradients["bert.embeddings.word_embeddings.weight"], expected, rtol=1e-3)
