"""Wrong schedules of real models are refused or caught, and blamed rightly; right ones pass.

A representative part of what ``tools/wrong_schedules.py --all`` runs; ``docs/results/wrong-schedules.md`` has all.
"""

from __future__ import annotations

import dataclasses

import pytest

from slapo_core.errors import VerifyError
from slapo_runtime.launcher import run_ranks
from tests.integration.bank.judging import blames_rightly
from tests.integration.bank.oracle import changes, observe
from tests.integration.bank.right import base, right_schedules
from tests.integration.bank.running import CAUGHT, preload, run_cases
from tests.integration.bank.steps import Wrong
from tests.integration.bank.wrong import bank, faults, wrong_schedules
from tests.tiers import sampled

preload()

WRONG = (
    "gpt2/whole: partial sums gathered: transformer.h.0.mlp.c_proj",
    "qwen3/whole: backward sync in the place of the forward one: model.layers.0.mlp.down_proj",
    "llama/whole: one step at a glob that catches too much: model.layers.0.mlp.*_proj",
    "bert/whole: row split on the output axis: bert.encoder.layer.0.attention.output.dense",
    "llama/whole: wrong range of words: model.embed_tokens",
    "llama/whole: table split by features, summed like words: model.embed_tokens",
    "vit/whole: head split by its input without its input split: classifier",
    "bert/whole: a shared tensor split twice: bert.embeddings.word_embeddings",
    "llama/whole: rotary frequencies split: model.rotary_emb",
    "llama/sequence: sequence: left too early: model.norm",
    "gpt2/whole: positions split: transformer.wpe, axis 1",
    "bert/whole: bias of the head not split: cls.predictions",
    "gpt2/whole: layers in another order: transformer.h",
    "bert/whole: tied table: only one end summed: cls.predictions.decoder",
    "bert/whole: transposed weight: cls.predictions.transform.dense",
    "bert/whole: gradient scaled in backward only: bert.encoder.layer.0.output.LayerNorm",
    "llama/whole: other values of a shared tensor on one rank, from a step: model.layers.1.input_layernorm",
    "llama/whole: gather of the logits missing: lm_head",
    "bert/whole/dtype=bfloat16: a sync missing in a model of bfloat16: bert.encoder.layer.0.attention.self",
    "bert/whole: output detached: bert.encoder.layer.0.output.LayerNorm",
    "gpt2/whole: an attribute that is read from the configuration: transformer.h.0.attn",
    "bert/whole: backward sync missing: bert.encoder.layer.1.attention.self",
    "bert/whole: forward sync missing: bert.encoder.layer.1.attention.output.dense",
    "gpt2/each: one backward sync of several missing: transformer.h.0.mlp.c_fc",
    "gpt2/whole: wrong in evaluation only: transformer.h.0.ln_1",
    "qwen3/whole: gradient of a norm of heads not summed: model.layers.0.self_attn.q_norm",
)
RIGHT = (
    "bert/attention.0/around",
    "bert/all/checkpoint before/0.1",
    "gpt2/all/backwards",
    "gpt2/all/equal norms behind/0.0",
    "llama/all/bfloat16/mask",
    "llama/sequence/labels/float32",
    "qwen3/sequence/mask/float32",
    "qwen3/all/shards first",
    "t5/cross/around",
    "t5/attention.encoder/each",
    "vit/all/rows first",
    "vit/all/hooked",
)


@pytest.mark.ranks
def test_sampled_wrong_schedules_are_blamed_on_the_right_steps() -> None:
    answers = run_ranks(run_cases, sampled(WRONG), world_size=2, timeout=600, compare=False)
    for mine, other in zip(*answers, strict=True):
        assert mine.outcome == other.outcome, mine.name
        assert mine.outcome in CAUGHT, f"{mine.outcome}: {mine.name}"
        assert mine.blame, f"{mine.name}: {mine.text}"
    assert len({result.kind for result in answers[0]}) == len(sampled(WRONG))


@pytest.mark.ranks
def test_right_schedules_of_every_kind_raise_no_alarm() -> None:
    answers = run_ranks(run_cases, sampled(RIGHT), world_size=2, timeout=600, compare=False)
    assert {result.name: result.text for result in answers[0] if result.outcome != "agrees"} == {}


def test_the_bank_is_as_large_as_its_page_says() -> None:
    wrong = wrong_schedules()
    users = {each.name for each in faults() if each.is_users}
    kinds = [wrong[name][0] for name in bank() if wrong[name][0] not in users]
    assert len(kinds) >= 300
    assert len(set(kinds)) >= 60
    assert len(right_schedules()) >= 300
    for kind, case in (wrong[name] for name in bank()):
        assert case.guilty or case.near or case.add or case.outside or case.anywhere, kind
        assert all(0 <= position < len(case.steps) for position in case.guilty), kind
        assert case.steps != case.right.steps or case.options or case.by_hand, kind


def test_the_plain_comparison_sees_a_mistake_and_none_between_equal_schedules() -> None:
    right = dataclasses.replace(base("bert", "layers"), ranks=1)
    seen = observe(right, right.steps, 0, {})
    reordered = sorted(right.steps, key=lambda each: each.part, reverse=True)
    assert changes(seen, observe(right, reordered, 0, {})) is None
    assert changes(seen, observe(right, (), 0, {})) is None
    for kind, begins in (
        ("a module scaled by 1 + 1e-3", "output loss of a batch of 2 in float64 differs by "),
        ("gradient scaled in backward only", "gradient bert."),
        ("wrong in evaluation only", "evaluated loss of labels before in float64 differs by "),
        ("wrong for a batch of one only", "output loss of a batch of 1 in float64 differs by "),
        ("wrong in single precision only", "output logits of a batch of 2 in float32 differs by "),
        ("uses the weight it was made with", "evaluated loss of labels after step 1 in float64 differs by "),
        ("a weight that gets no gradient", "gradient bert.encoder.layer.0.output.LayerNorm.weight of a batch of 2 in"),
    ):
        case = wrong_schedules()[f"bert/whole: {kind}: bert.encoder.layer.0.output.LayerNorm"][1]
        found = changes(seen, observe(right, (case.steps[0], *right.steps), 0, {}))
        assert found is not None, kind
        assert found.startswith(begins), found


def test_blame_is_right_only_where_it_names_the_step_or_its_pair_and_little_else() -> None:
    right = base("llama")
    at = [f"#{number} {each}" for number, each in enumerate(right.steps, start=1)]
    made = [range(number, number + 1) for number in range(len(right.steps))]

    def judged(case: Wrong, *steps: int, text: str = "") -> bool:
        return blames_rightly(case, made, VerifyError(text, steps=[at[number] for number in steps]), refused=None)

    step = Wrong(right, "", right.steps, guilty=(2,))
    assert judged(step, 2)
    assert judged(step, 0, 1, 2)
    assert not judged(step, 0, 1, 2, 3)
    assert not judged(step, 3)
    missing = Wrong(right, "", right.steps, near=right.places("mlp.0"), add=(("model.layers.0.mlp", "sync("),))
    inside = [number for number, each in enumerate(right.steps) if each.part == "mlp.0"]
    assert judged(missing, *inside)
    assert judged(missing, inside[0], 0, 1)
    assert not judged(missing, inside[0], 0, 1, 2)
    assert not judged(missing, 0)
    assert not judged(missing)
    assert judged(missing, 0, text='add sch[\'model.layers.0.mlp\'].sync("bwd_post", "all_reduce")')
    assert not judged(missing, 0, text='add sch[\'model.layers.1.mlp\'].sync("bwd_post", "all_reduce")')
    assert judged(missing, 0, text='add sch[\'model.layers.*.mlp\'].sync("bwd_post", "all_reduce")')
    outside = Wrong(right, "", right.steps, near=("model.norm",), outside=True)
    assert judged(outside, text="no step causes it: ... were changed outside of the schedule")
    assert not judged(outside, 3)
