"""``pipeline_split(stages=N, balance=...)``: which blocks it finds, what they cost, what is recorded and refused."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_graph.example_calls import example_call
from slapo_pipeline.balance import run_in_sections
from tests.messages import Messages


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Layers(nn.Module):
    """The blocks in a module of their own, behind something that runs first though it is registered last."""

    def __init__(self, inner) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Block(8, each) for each in inner)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        for layer in self.layer:
            x = layer(x)
        return self.norm(x)


class Language(nn.Module):
    def __init__(self, inner=(16,) * 6, vocabulary: int = 64) -> None:
        super().__init__()
        self.head = nn.Linear(8, vocabulary, bias=False)  # runs last
        self.body = Layers(inner)
        self.embed = nn.Embedding(vocabulary, 8)  # runs first
        self.embed.weight = self.head.weight

    def forward(self, ids):
        return self.head(self.body(self.embed(ids)))


IDS = torch.zeros(2, 4, dtype=torch.int64)
BLOCK = 8 * 16 + 16 + 16 * 8 + 8


def schedule(model=None, **arguments):
    return slapo.create_schedule(model or Language(), **{"example_inputs": {"ids": IDS}, **arguments})


def cuts_of(sch):
    return sch.records[-1].primitive.after


def test_layers_before_and_after_the_blocks_count_in_the_order_of_the_run():
    # The tied weight is four blocks large, and used before the first block and after the last one.
    sch = schedule(Language(vocabulary=BLOCK // 8 * 4))
    sch["body"].pipeline_split(stages=4)
    assert cuts_of(sch) == ("layer.0", "layer.2", "layer.4")
    sch = schedule(Language(vocabulary=8))
    sch["body"].pipeline_split(stages=3)
    assert cuts_of(sch) == ("layer.1", "layer.3")


def test_the_container_may_be_the_list_or_a_module_above_it_or_the_model():
    found = []
    for path in ("body.layer", "body", ""):
        sch = schedule()
        node = sch[path] if path else sch.root
        node.pipeline_split(stages=3)
        found.append(sch.records[-1].primitive.cuts(path))
    assert found == [("body.layer.1", "body.layer.4")] * 3
    sequential = schedule(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 8)), example_inputs=None)
    sequential.pipeline_split(stages=2)
    assert cuts_of(sequential) == ("1",)


def test_without_example_inputs_the_order_of_registration_counts(message: Messages):
    sch = schedule(Language(vocabulary=BLOCK // 8 * 4), example_inputs=None)
    sch["body"].pipeline_split(stages=2)  # the head is taken to come first, and its tied twin last
    assert cuts_of(sch) == ("layer.2",)
    with pytest.raises(slapo.PreconditionError) as caught:
        schedule(example_inputs=None)["body"].pipeline_split(stages=2, balance="flops")
    message(caught, "at 'body'", "requires example inputs", "create_schedule(model, example_inputs=")


def test_flops_balance_the_computation_of_blocks():
    inner = (4, 4, 4, 100, 4, 4)
    sch = schedule(Language(inner))
    sch["body"].pipeline_split(stages=2, balance="flops")
    tokens, head = IDS.numel(), 2 * IDS.numel() * 8 * 64
    costs = [2 * tokens * 2 * 8 * each for each in inner]
    best = min(range(1, 6), key=lambda cut: max(sum(costs[:cut]), sum(costs[cut:]) + head))
    assert cuts_of(sch) == (f"layer.{best - 1}",)
    with sch.reference() as model:
        sections = run_in_sections(model, ((IDS,), {}), [f"body.layer.{index}" for index in range(6)])
    assert [each.flops for each in sections[1:-1]] == costs
    assert (sections[0].flops, sections[-1].flops) == (0, head)


@pytest.mark.parametrize(("attention", "dropout"), [("sdpa", 0.0), ("sdpa", 0.1), ("eager", 0.1)])
def test_flops_of_bert_equal_the_formula(attention, dropout):
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=64,
        intermediate_size=256,
        num_attention_heads=4,
        num_hidden_layers=3,
        vocab_size=50,
        attn_implementation=attention,
        attention_probs_dropout_prob=dropout,  # with it, torch writes the attention of CPUs out
    )
    batch, length, hidden = 2, 24, 64
    ids = torch.zeros(batch, length, dtype=torch.int64)
    formula = 24 * batch * length * hidden**2 + 4 * batch * length**2 * hidden
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = BertModel(config, add_pooling_layer=False)
        sch = slapo.create_schedule(model, example_inputs={"input_ids": ids.to(device)})
        sections = run_in_sections(model, example_call(sch.root), [f"encoder.layer.{index}" for index in range(3)])
        assert [each.flops for each in sections[1:-1]] == [formula] * 3


def test_the_answer_is_recorded_saved_and_taken_again():
    sch = schedule()
    sch["body"].pipeline_split(stages=3)
    document = json.loads(sch.to_json())
    assert document["records"][0]["arguments"] == {
        "stages": 3,
        "balance": "parameters",
        "after": ["layer.1", "layer.4"],
    }
    document["records"][0]["arguments"]["after"] = ["layer.0", "layer.4"]
    again = slapo.replay(Language(), document)  # without example inputs; and not where it would cut by itself
    assert cuts_of(again) == ("layer.0", "layer.4")
    assert "when stages are made, the model is cut after layer.0, layer.4" in again.explain()


def test_steps_before_do_not_change_the_cut():
    sch = schedule(mesh={"tp": 2})  # only declared: nothing could run it
    for node in sch["body.layer.*"][3:]:
        node["up"].shard(["weight", "bias"], axis=0)
        node["down"].shard("weight", axis=1)
        node["down"].sync("fwd_post", "all_reduce")
    for balance in ("parameters", "flops"):
        plain = schedule()
        plain["body"].pipeline_split(stages=3, balance=balance)
        sch["body"].pipeline_split(stages=3, balance=balance)
        assert cuts_of(sch) == cuts_of(plain)
        sch.undo()


def test_earlier_cuts_bound_the_balanced_range():
    model = nn.ModuleDict({"a": Layers((16,) * 4), "b": Layers((16,) * 4)})

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x):
            return self.parts["b"](self.parts["a"](x))

    def cut(with_other):
        sch = slapo.create_schedule(Both(), example_inputs={"x": torch.zeros(2, 8)})
        if with_other:
            sch["parts.a"].pipeline_split()
        sch["parts.a"].pipeline_split(stages=2)
        found = [cuts_of(sch)]
        if with_other:
            sch["parts.b"].pipeline_split(stages=2)
            found.append(cuts_of(sch))
        sch.undo(to=0)
        return found

    assert cut(False) == [("layer.2",)]  # everything behind belongs to the second stage
    assert cut(True) == [("layer.1",), ("layer.1",)]
