"""``slapo_pipeline.stages(sch)``: what the stages are, printed and as data."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import slapo_core as slapo
import slapo_pipeline
from slapo_graph.graph import TracedForward
from tests.messages import Messages


class Skipping(nn.Module):
    """A mask that is made early and used late, a tied weight, a loss and a second output of an early stage."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layer = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, labels=None):
        x = self.embed(ids)
        mask = x.sum(-1, keepdim=True) > 0
        first = self.layer[0](x)
        x = self.layer[1](first)
        logits = self.head(self.dropout(self.layer[2](x)) * mask)
        out = {"logits": logits, "hidden": (first,)}
        if labels is not None:
            out["loss"] = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return out


BATCH = {"ids": torch.zeros(4, 3, dtype=torch.int64), "labels": torch.zeros(4, 3, dtype=torch.int64)}


def schedule(**arguments):
    return slapo.create_schedule(Skipping(), **{"example_inputs": BATCH, **arguments})


TEXT = """\
3 stages of Skipping, for ids (4, 3) int64, labels (4, 3) int64

stage  modules           parameters  forward FLOPs  reads from the batch
0      embed .. layer.0        152*          1,536  ids
1      layer.1                  72           1,536  -
2      layer.2 .. head         152*          3,456  labels

* tied: embed.weight, in the stages 0 and 2

stage 0 -> 1: 396 bytes
  gt       (SHAPE1) bool      12 bytes  no gradient, for stage 2
  layer_0  (SHAPE8) float32  384 bytes  gradient, for stage 1

stage 1 -> 2: 396 bytes
  gt       (SHAPE1) bool      12 bytes  no gradient, relayed from stage 0, for stage 2
  layer_1  (SHAPE8) float32  384 bytes  gradient, for stage 2

output: logits (stage 2), hidden.0 (stage 0), loss (stage 2)"""


def test_view_prints_stages_boundaries_ties_and_output():
    sch = schedule()
    sch.pipeline_split(stages=3)
    stages = slapo_pipeline.stages(sch)
    samples = "batch" if "batch" in str(stages).partition("->")[2] else "4"
    expected = TEXT.replace("SHAPE1", f"{samples}, 3, 1").replace("SHAPE8", f"{samples}, 3, 8")
    assert [sorted(part.splitlines()) for part in str(stages).split("\n\n")] == [
        sorted(part.splitlines()) for part in expected.split("\n\n")
    ]  # the order of the values on a boundary is liveness' own
    assert sch.model.training
    assert sch.records[-1].primitive.after == ("layer.0", "layer.1")


def test_view_is_data():
    sch = schedule()
    sch["layer.0"].pipeline_split()
    stages = slapo_pipeline.stages(sch)
    assert [stage.module for stage in stages.partition.stages]
    assert set(stages.liveness.sent(0)) == {"gt", "layer_0"}
    assert stages.bytes_sent(0) == 396
    first, second = json.loads(json.dumps(stages.to_json()))["stages"]
    assert first["sent"] == second["received"]
    assert (first["parameters"], first["tied"], first["flops"]) == (152, ["embed.weight"], 1536)
    mask = next(value for value in first["sent"] if value["name"] == "gt")
    assert mask | {"shape": None} == {
        "name": "gt",
        "shape": None,
        "dtype": "bool",
        "nbytes": 12,
        "requires_grad": False,
        "producer": 0,
        "consumers": [1],
        "is_relayed": False,
    }


def test_the_batch_given_counts_and_the_full_output_may_be_wanted():
    sch = schedule(example_inputs=None)
    sch["layer.0"].pipeline_split()
    sch["layer.1"].pipeline_split()
    two = {"ids": torch.zeros(2, 5, dtype=torch.int64)}
    stages = slapo_pipeline.stages(sch, two, full_output=True)
    assert stages.batch == {"ids": "(2, 5) int64"}
    assert "layer_0" in stages.liveness.sent(1)  # the hidden states come along to a loss of the whole output
    assert "loss" not in stages.outputs
    assert set(slapo_pipeline.stages(sch, BATCH).liveness.sent(1)) == {"gt", "layer_1"}


def test_stages_restores_the_evaluation_mode():
    sch = schedule()
    sch.model.eval()
    sch["layer.0"].pipeline_split()
    slapo_pipeline.stages(sch)
    assert not any(module.training for module in sch.model.modules())


def test_parameter_counts_equal_the_reference_model():
    sch = schedule(mesh={"tp": 2, "pp": 2})
    sch["layer.2"].shard(["weight", "bias"], axis=0)
    node = sch["layer.2"]
    assert tuple(node.module.weight.shape) == (4, 8)
    from slapo_pipeline.view import _full_shape

    assert _full_shape(sch, "layer.2.weight", node.module.weight) == (8, 8)


def test_flops_that_cannot_be_counted_are_shown_as_unknown():
    class Scaled(nn.Module):
        def forward(self, x):
            return x * float(x.max())

    sch = slapo.create_schedule(nn.Sequential(nn.Linear(2, 2), Scaled()), example_inputs=(torch.ones(2, 2),))
    sch["0"].pipeline_split()
    stages = slapo_pipeline.stages(sch)
    assert stages.stages[0].flops is None
    assert stages.notes[0].startswith("operations are not counted: without values ")
    assert "note: operations are not counted" in str(stages)


def test_stages_without_a_batch_or_a_cut_are_refused(message: Messages):
    sch = schedule(example_inputs=None)
    with pytest.raises(slapo.ArgumentError) as caught:
        slapo_pipeline.stages(sch)
    message(caught, "no example inputs", "stages(sch, {'input_ids': ids})")
    with pytest.raises(slapo.ArgumentError) as caught:
        slapo_pipeline.stages(schedule())
    message(caught, "no step cuts")
    with pytest.raises(slapo.ArgumentError, match="not take this batch"):
        slapo_pipeline.stages(schedule(), {"words": BATCH["ids"]})


def test_operations_of_a_mixture_of_experts_are_counted():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=50,
        use_cache=False,
    )
    sch = slapo.create_schedule(
        MixtralForCausalLM(config), example_inputs={"input_ids": torch.zeros(2, 8, dtype=torch.int64)}
    )
    sch["model.layers.0"].pipeline_split()
    found = slapo_pipeline.stages(sch)
    attention = 8 * 16 * 32**2 + 4 * 2 * 8**2 * 32
    experts = 2 * (3 * 2 * 16 * 32 * 64)  # two of the four for each token
    router, head = 2 * 16 * 32 * 4, 2 * 16 * 32 * 50
    assert [stage.flops for stage in found.stages] == [
        attention + experts + router,
        attention + experts + router + head,
    ]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.sums = nn.Linear(8, 8), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.fc(x))
        return y.sum(1) if x.dim() == 3 and self.sums else y


def summed(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x).sum(1) if x.dim() == 3 else torch.relu(x)


@pytest.mark.parametrize("odd", [None, "attribute", "rewrite"])
def test_one_of_equal_traced_blocks_runs_for_the_cut(odd: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    sch = slapo.create_schedule(nn.Sequential(*(Block() for _ in range(5))), example_inputs=(torch.ones(2, 8),))
    sch["*"].trace(flatten=True).checkpoint()
    sch["2"].pipeline_split()
    if odd == "attribute":  # which no recording has read so far
        sch.model[2].sums = True
    elif odd == "rewrite":
        sch["2"].replace(summed, match=torch.relu)
    ran: list[str] = []
    call = TracedForward.__call__
    monkeypatch.setattr(TracedForward, "__call__", lambda self, *args: ran.append(self.path) or call(self, *args))
    found = slapo.stages(sch, (torch.ones(2, 3, 8),))
    assert {value.shape for value in found.partition.values.values()} == {(2, 3, 8) if odd is None else (2, 8)}
    assert ran == (["0", "1"] if odd is None else ["0", "1", "2", "3"])
