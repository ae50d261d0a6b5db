"""Sequence parallelism of automatic schedules, and the plan of transformers as a hint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
import slapo_models
from slapo_testing import preload_modules, run_ranks

from .odd_modules import made

preload_modules("transformers.models.llama.modeling_llama")


def llama(length: int = 12) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, num_hidden_layers=3, use_cache=False, **sizes))
    ids = torch.randint(97, (2, length))
    return model, {"input_ids": ids, "labels": ids}


def scheduled(model: nn.Module, batch: Any, **options: Any) -> tuple[Any, Any]:
    sch: Any = slapo.create_schedule(model, mesh={"tp": 2}, example_inputs=batch)
    return sch, slapo_models.auto(sch, kernels=False, **options)


def steps(sch: Any, layer: str) -> set[tuple[Any, ...]]:
    """The collectives of a layer."""
    found = set()
    for record in sch.records:
        if record.name in ("tp.sync", "tp.sync_gradient") and record.path.startswith(layer):
            given = record.primitive.arguments()
            found.add((record.path, given.get("mode"), given.get("op"), given.get("axis"), given.get("names")))
    return found


def by_hand(sch: Any) -> None:
    """The schedule of docs/real-models.md."""
    for layer in sch["model.layers.*"]:
        attention, mlp = layer["self_attn"], layer["mlp"]
        for name in ("q_proj", "k_proj", "v_proj"):
            attention[name].shard("weight", axis=0)
        attention.sync("fwd_pre", "all_gather", axis=1, inputs=("hidden_states",))
        attention["o_proj"].shard("weight", axis=1).sync("fwd_post", "reduce_scatter", axis=1)
        for name in ("gate_proj", "up_proj"):
            mlp[name].shard("weight", axis=0)
        mlp.sync("fwd_pre", "all_gather", axis=1)
        mlp["down_proj"].shard("weight", axis=1).sync("fwd_post", "reduce_scatter", axis=1)
        for name in ("input_layernorm", "post_attention_layernorm"):
            layer[name].sync_gradient("weight")


def test_a_layer_is_on_slices_as_by_hand() -> None:
    sch, report = scheduled(*llama(), sequence_parallel=True)
    hand: Any = slapo.create_schedule(llama()[0], mesh={"tp": 2})
    by_hand(hand)
    assert steps(sch, "model.layers.1") == steps(hand, "model.layers.1")
    assert steps(sch, "model.layers.0") - steps(hand, "model.layers.0") == {
        ("model.layers.0", "fwd_pre", "split", 1, None)
    }
    assert len(report.scattered) == 6
    assert not report.all_reduced
    assert "6 of 6 sums are reduce-scattered" in str(report)


def test_dropout_of_slices_is_forked_in_the_order_of_the_model() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 97, "n_positions": 16, "attn_pdrop": 0.0}
    sch, report = scheduled(GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False)), llama()[1], sequence_parallel=True)
    forked = [record.path for record in sch.records if record.name == "tp.fork_rng"]
    dropouts = ("attn.resid_dropout", "mlp.dropout")
    assert forked == [f"transformer.h.{number}.{name}" for number in range(3) for name in dropouts]
    assert not report.assumptions


def test_frozen_parameters_are_an_assumption() -> None:
    model, batch = llama()
    model.get_parameter("model.embed_tokens.weight").requires_grad_(False)
    _, report = scheduled(model, batch)
    assert "frozen" in " ".join(report.assumptions)


def test_a_length_that_the_ranks_do_not_divide_stays_all_reduced() -> None:
    sch, report = scheduled(*llama(11), sequence_parallel=True)
    plain, _ = scheduled(*llama(11))
    assert [str(record) for record in sch.records] == [str(record) for record in plain.records]
    assert set(report.all_reduced.values()) == {"11 elements of the sequence are not divisible by 2"}
    assert "all-reduced: 'model.layers." in str(report)


def verify_slices() -> None:
    model, batch = llama()
    sch, _ = scheduled(model, batch, sequence_parallel=True)
    slapo.verify(sch, batch, optimizer_steps=1)
    ids = torch.randint(97, (1, 11))
    with pytest.raises(slapo.ArgumentError, match="11 elements are not divisible by 2 ranks"):
        model(input_ids=ids)


@pytest.mark.ranks
def test_slices_compute_the_same_and_other_lengths_are_refused() -> None:
    run_ranks(verify_slices, world_size=2)


# -- the plan of transformers ------------------------------------------------------------------------------------


def test_stages_are_refused_before_a_step_is_applied() -> None:
    model, batch = llama()
    sch: Any = slapo.create_schedule(model, mesh={"pp": 2, "tp": 2}, example_inputs=batch)
    with pytest.raises(slapo.ArgumentError, match="stages"):
        slapo_models.auto(sch, kernels=False, sequence_parallel=True)
    assert not sch.records


def test_a_plan_that_agrees_says_nothing() -> None:
    _, report = scheduled(*llama())
    assert not report.notes


def test_a_plan_that_lies_changes_no_step() -> None:
    model, batch = llama()
    plain, _ = scheduled(llama()[0], batch)
    model._tp_plan = {  # type: ignore[assignment]
        "model.layers.*.self_attn.q_proj": "rowwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.input_layernorm": "colwise",
        "model.layers.*.missing": "rowwise",
    }
    sch, report = scheduled(model, batch)
    assert [str(record) for record in sch.records] == [str(record) for record in plain.records]
    (wrong,) = (note for note in report.notes if "q_proj" in note)
    assert wrong.endswith("axis 0 is split, transformers' plan has rowwise there")
    assert any("down_proj" in note and "has nothing there" in note for note in report.notes)
    assert not any("up_proj" in note or "layernorm" in note for note in report.notes)


def test_a_matrix_left_whole_says_what_the_plan_has() -> None:
    model, batch = made("twice")
    model._tp_plan = {"block.*": "colwise"}  # type: ignore[assignment]
    sch: Any = slapo.create_schedule(model, mesh={"tp": 3}, example_inputs=batch)
    report = slapo_models.auto(sch, kernels=False)
    assert report.left_whole["block.0.weight"].startswith("32 is not divisible by 3")
    assert report.left_whole["block.0.weight"].endswith("; transformers' plan has colwise there")
