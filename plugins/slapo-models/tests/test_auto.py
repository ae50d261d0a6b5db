"""Automatic schedules: axes, what is split, what is left whole, and that the numbers are the reference model's."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
import slapo_models
from slapo_models.auto.axes import Axis, concatenation, divided, product, segment, unify, viewed
from slapo_testing import preload_modules, run_ranks
from tests.tiers import sampled

from .families import FAMILIES
from .odd_modules import ODD, WIDTH, Dropping, made

preload_modules("transformers.models.bert.modeling_bert", "transformers.models.llama.modeling_llama")


def scheduled(model: nn.Module, batch: Any, ranks: int = 2) -> tuple[slapo.Schedule, Any]:
    sch = slapo.create_schedule(model, mesh={"tp": ranks}, example_inputs=batch)
    return sch, slapo_models.auto(sch, kernels=False)


def layouts(sch: slapo.Schedule) -> dict[str, str]:
    """How each split parameter and buffer is divided."""
    found = {}
    for node in sch.root.walk():
        for name in (*node.parameters, *node.buffers):
            if node.layout(name).placements:
                found[f"{node.path}.{name}"] = str(node.layout(name)).partition(", at most")[0]
    return found


def collectives(sch: slapo.Schedule, layer: str) -> list[tuple[Any, ...]]:
    return sorted(
        (record.primitive.arguments()["mode"], record.primitive.arguments()["op"])
        for record in sch.records
        if record.name == "tp.sync" and record.path.startswith(layer)
    )


# -- axes ------------------------------------------------------------------------------------------------------


def test_a_view_cuts_an_axis_and_a_later_one_puts_it_together() -> None:
    width = Axis(24)
    heads, size = viewed([width], (4, 6), "view")
    assert [factor.size for factor in width.factors()] == [4, 6]
    (again,) = viewed([heads, size], (24,), "view")
    assert again.factors() == width.factors()


def test_unified_axes_have_the_finer_structure_of_both() -> None:
    one, other = Axis(24), Axis(24)
    divided(one, 4, "view")
    divided(other, 2, "view")
    unify(one, other, "add")
    assert one.factors() == other.factors()
    assert [factor.size for factor in one.factors()] == [2, 2, 6]


def test_segments_of_a_concatenation_are_unified_one_by_one() -> None:
    packed, bias = Axis(24), Axis(24)
    query = segment(packed, 0, 16, "split")
    viewed([query], (4, 4), "view")
    unify(packed, bias, "add")
    assert [factor.size for factor in segment(bias, 0, 16, "slice").factors()] == [4, 4]
    assert segment(bias, 16, 24, "slice").found() is segment(packed, 16, 24, "slice").found()


def test_a_view_takes_the_head_size_out_of_queries_keys_and_values() -> None:
    packed = concatenation([product([Axis(4), Axis(8)]), Axis(8), Axis(8)])
    heads, size = viewed([packed], (6, 8), "view")
    assert [part.size for part in heads.parts] == [4, 1, 1]
    assert size.found() in packed.factors()


def test_a_reason_reaches_what_an_axis_becomes() -> None:
    width, other = Axis(24), Axis(24)
    width.block("softmax")
    divided(other, 4, "view")
    unify(width, other, "add")
    assert all("softmax" in leaf.reasons for leaf in other.leaves())


def test_a_cut_within_a_part_is_refused() -> None:
    width = product([Axis(4), Axis(6)])
    viewed([width], (3, 8), "view")
    assert all(leaf.reasons for leaf in width.leaves())


# -- families ----------------------------------------------------------------------------------------------------


SAMPLED = (("bert", 2), ("llama", 2), ("qwen3", 4))
MORE_RANKS = ("qwen3", "mistral", "gemma2", "gemma3", "mixtral", "qwen3_moe")  # than KV heads


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(name, ranks, marks=() if (name, ranks) in SAMPLED else pytest.mark.breadth)
        for name, ranks in (*((name, 2) for name in FAMILIES), *((name, 4) for name in MORE_RANKS))
    ],
)
def test_a_family_is_split_as_by_hand(name: str, ranks: int) -> None:
    family = FAMILIES[name]
    sch, report = scheduled(family.make(), family.batch, ranks)
    by_hand = slapo.create_schedule(family.make(), mesh={"tp": ranks})
    family.apply(by_hand, kernels=False)
    if name == "wide_resnet":  # whose residual features are split from end to end
        assert len(layouts(sch)) >= len(layouts(by_hand))
        return
    assert layouts(sch) == layouts(by_hand)
    for layer in by_hand[family.layers]:  # type: ignore[union-attr]
        assert collectives(sch, layer.path) == collectives(by_hand, layer.path)
    in_layers = [path for path in report.left_whole if ".layer" in path or ".h." in path or ".block" in path]
    assert not [path for path in in_layers if not path.endswith("mlp.gate.weight")]  # a router
    assert {record.name for record in sch.records} >= {"tp.shard", "tp.sync", "loss.linear_cross_entropy"}
    for before, record in itertools.pairwise(sch.records):
        if str(record.primitive) == "sync('fwd_post', op='all_reduce')" and layouts(sch).get(f"{record.path}.weight"):
            assert before.path == record.path  # the layer's own shard


def test_each_step_has_its_reason() -> None:
    sch, _ = scheduled(*made("attention"))
    assert "its output is a partial sum" in sch.explain()
    assert all(record.edits[-1] for record in sch.records)


# -- odd models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ODD)
def test_what_is_split_of_an_odd_model(name: str) -> None:
    model, batch = made(name)
    matrices = {path for path, parameter in model.named_parameters() if parameter.dim() > 1}
    _, report = scheduled(model, batch)
    assert tuple(sorted(set(report.split) & matrices)) == tuple(sorted(ODD[name].split))
    assert set(report.left_whole) == matrices - set(ODD[name].split)


def verify_odd_models(names: Sequence[str]) -> None:
    for name in names:
        model, batch = made(name)
        sch, _ = scheduled(model, batch)
        if sch.records:
            slapo.verify(sch, batch, optimizer_steps=1)


@pytest.mark.ranks
def test_odd_models_compute_the_same() -> None:
    run_ranks(verify_odd_models, sampled(ODD, 3), world_size=2)


def verify_families() -> None:
    for name in ("bert", "gpt", "t5", "llama"):
        family = FAMILIES[name]
        sch, _ = scheduled(family.make(), family.batch)
        slapo.verify(sch, family.batch, optimizer_steps=1)


@pytest.mark.ranks
@pytest.mark.breadth
def test_families_compute_the_same() -> None:
    run_ranks(verify_families, world_size=2, timeout=300)


def test_random_numbers_of_shards_are_forked_where_none_are_of_full_tensors() -> None:
    """Each rank drops its own elements of a shard; all drop the same ones of a full tensor."""
    model = nn.Sequential(Dropping(), Dropping(inputs=True))
    sch, report = scheduled(model, (torch.randn(3, 5, WIDTH),))
    assert not report.left_whole
    assert [record.path for record in sch.records if record.name == "tp.fork_rng"] == ["0"]


# -- refusals ----------------------------------------------------------------------------------------------------


def test_a_split_that_does_not_divide_is_left_whole_with_the_reason() -> None:
    sch, report = scheduled(*made("twice"), ranks=3)
    assert not sch.records
    assert report.left_whole["block.0.weight"].startswith("32 is not divisible by 3")
    assert "left whole: 'block.0.weight'" in str(report)


def test_one_rank_splits_nothing() -> None:
    sch, report = scheduled(*made("twice"), ranks=1)
    assert not sch.records
    assert report.notes


def test_auto_needs_a_batch() -> None:
    sch = slapo.create_schedule(made("twice")[0], mesh={"tp": 2})
    with pytest.raises(slapo.ArgumentError, match="batch"):
        slapo_models.auto(sch)


def test_auto_is_the_first_step() -> None:
    model, batch = made("twice")
    sch = slapo.create_schedule(model, mesh={"tp": 2}, example_inputs=batch)
    sch["block.0"].shard("weight", axis=0)
    with pytest.raises(slapo.ArgumentError, match="steps"):
        slapo_models.auto(sch)


def test_inputs_that_do_not_fit_are_named() -> None:
    sch = slapo.create_schedule(made("twice")[0], mesh={"tp": 2})
    with pytest.raises(slapo.ArgumentError, match="recorded"):
        slapo_models.auto(sch, (torch.randn(2, WIDTH + 1),))


def test_the_model_is_not_run_with_its_values() -> None:
    model, batch = made("convolutions")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sch, _ = scheduled(model, batch)
    sch.undo(to=0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.breadth
def test_a_model_of_seventy_billion_parameters_is_scheduled_on_meta() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=8, use_cache=False))
    ids = torch.zeros(1, 4096, dtype=torch.long)
    before = time.process_time()
    _, report = scheduled(model, {"input_ids": ids, "labels": ids}, ranks=8)
    assert time.process_time() - before < 60
    assert not report.left_whole
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma2", marks=pytest.mark.breadth)])
def test_a_cache_of_keys_and_values_that_the_model_returns_splits_nothing_less(name: str) -> None:
    schedules = []
    for use_cache in (False, True):
        model = FAMILIES[name].make()
        model.config.use_cache = use_cache
        sch, report = scheduled(model, FAMILIES[name].batch)
        schedules.append(([(record.name, record.path, str(record.primitive)) for record in sch.records], report))
    assert schedules[0] == schedules[1]
