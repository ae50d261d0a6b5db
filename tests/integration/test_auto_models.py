"""The automatic schedule against reference models, by a comparison without slapo-verify.

A representative part of what ``tools/auto_models.py --all`` runs; ``docs/results/auto_matrix.md`` has the table.
"""

from __future__ import annotations

import pytest

from slapo_runtime.launcher import preload_modules, run_ranks
from tests.integration.zoo.automatic import judge_on_ranks, plant_on_ranks
from tests.support.trap_models import SEQUENCE_TRAPS, TRAP_MODELS
from tests.tiers import sampled

SPLIT = sampled(("causal: llama", "causal: mixtral", "other: t5", "odd: packed by groups", "causal: gpt2"), 3)
TRAPS = sampled([f"trap: {name}" for name in TRAP_MODELS], 24)
MORE_RANKS = sampled(
    (
        "causal: llama", "trap: keys clip their gradient", "trap: keys without their module", "causal: qwen3",
        "causal: phi3", "trap: values are read besides", "trap: queries of a head beside each other",
        "causal: falcon", "causal: gpt_bigcode", "causal: mixtral",
    ), 5,
)  # fmt: skip
IN_SEQUENCE = sampled(
    ("causal: llama", "causal: gpt2", "other: t5", "causal: gemma2", "other: bert", "causal: mixtral"), 3
)
SEQUENCES = sampled([f"trap: {name}" for name in SEQUENCE_TRAPS], 14)
PLANTED = (
    "causal: qwen3", "causal: gpt2", "causal: falcon", "causal: opt", "causal: gemma2", "causal: gpt_neox",
    "causal: phi3", "causal: mixtral", "other: bert", "other: bart",
)  # fmt: skip

preload_modules("tests.integration.zoo.automatic")
preload_modules(
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mixtral", "t5", "qwen3", "gpt2"))
)


@pytest.mark.ranks
def test_an_automatic_schedule_splits_what_it_should_and_changes_no_number() -> None:
    answers = run_ranks(judge_on_ranks, (*SPLIT, *TRAPS), "auto", world_size=2, timeout=300)
    for found in zip(*answers, strict=True):
        assert [(one.name, one.result) for one in found] == [(found[0].name, "equal")] * 2
    for one in answers[0][: len(SPLIT)]:
        assert one.share >= 0.75, one
        assert one.kind not in ("causal", "odd") or one.collectives[:2] == one.megatron, one


@pytest.mark.ranks
def test_kv_heads_are_on_several_ranks_where_the_ranks_are_more() -> None:
    answers = run_ranks(judge_on_ranks, MORE_RANKS, "auto", world_size=4, timeout=300)
    for found in zip(*answers, strict=True):
        assert [(one.name, one.result) for one in found] == [(found[0].name, "equal")] * 4
    for one in answers[0]:
        if one.kind == "causal":
            assert one.share >= 0.75, one
            assert one.collectives[:2] == one.megatron, one


@pytest.mark.ranks
def test_the_comparison_sees_each_step_that_is_left_out() -> None:
    answers = run_ranks(plant_on_ranks, sampled(PLANTED, 10), "auto", world_size=2, timeout=300)
    for number, rank in enumerate(answers):
        for name, found in rank.items():
            assert {"tp.sync", "tp.shard"} <= set(found), name
            assert all(result.startswith(("seen: ", "refused: ")) for result in found.values()), (number, name, found)
    seen = [kind for found in answers[0].values() for kind, result in found.items() if result.startswith("seen: ")]
    assert {"tp.sync", "tp.sync_gradient"} <= set(seen)


@pytest.mark.ranks
def test_slices_of_the_sequence_change_no_number() -> None:
    answers = run_ranks(judge_on_ranks, (*IN_SEQUENCE, *SEQUENCES), "auto-sequence", world_size=2, timeout=300)
    for found in zip(*answers, strict=True):
        assert [(one.name, one.result) for one in found] == [(found[0].name, "equal")] * 2
        assert not [label for label in found[0].refused if label != "evaluation from a cache"]
    assert all(one.collectives[0] > one.megatron[0] for one in answers[0] if one.name == "causal: llama")


@pytest.mark.ranks
@pytest.mark.breadth
def test_the_comparison_sees_each_step_of_sequence_parallelism_that_is_left_out() -> None:
    names = ("causal: llama", "causal: gpt2", "other: bert", "causal: phi")
    answers = run_ranks(plant_on_ranks, names, "auto-sequence", world_size=2, timeout=300)
    for rank in answers:
        for name, found in rank.items():
            assert {"tp.sync", "tp.sync_gradient"} <= set(found), name
            assert all(result.startswith(("seen: ", "refused: ")) for result in found.values()), (name, found)
