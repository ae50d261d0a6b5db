"""``slapo observe``, and an estimate beside an observation."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

import slapo_core as slapo
from slapo_core.cli.main import make_app
from slapo_core.errors import ArgumentError
from slapo_estimate.comparison import Collectives
from tests.messages import Messages

MODULE = """
from collections.abc import Iterator
from dataclasses import dataclass
import torch
from torch import nn
import slapo_core as slapo
from slapo_core.effects import Calls

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(2))

    def forward(self, x, mask):
        for layer in self.layers:
            x = layer(x)
        return x[mask.bool()].sum()

@dataclass(frozen=True)
class Nothing(slapo.Primitive):
    name = "tests.nothing_at_all"
    equivalence = slapo.Equivalence.EXACT

    def apply(self, node, edit):
        edit.note("nothing to do")

    def effects(self, node):
        yield Calls("a kernel", 1)

def make_model():
    return Model()

def schedule(sch):
    for layer in ("layers.0", "layers.1"):
        sch[f"{layer}.0"].shard(["weight", "bias"], axis=0).sync("backward")
        sch[f"{layer}.2"].shard("weight", axis=1).sync("forward")

def no_op(sch):
    sch["layers.0"].checkpoint()
    sch["layers.1"].apply(Nothing())

def checkpoints(sch):
    sch["layers.0"].checkpoint()
"""

BATCH = ("--batch", "x=4x16:float32", "--batch", "mask=4:int64")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "tiny_observed.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("tiny_observed", None)


def run(schedule: str, *words: str) -> Result:
    names = (f"tiny_observed:{schedule}", "--model", "tiny_observed:make_model")
    return CliRunner().invoke(make_app(), ["observe", *names, *words])


def test_a_missing_effect_ends_with_1(here: Path) -> None:
    right = run("checkpoints", *BATCH)
    assert right.exit_code == 0, right.output
    assert "effects seen: 1 of 1" in right.output
    wrong = run("no_op", *BATCH, "--json", "--steps", "2")
    assert wrong.exit_code == 1
    found = json.loads(wrong.stdout)
    assert (found["missing"], found["steps"]) == (1, 2)
    assert [one["source"].partition(" ")[2] for one in found["findings"] if not one["is_seen"]] == [
        "nothing_at_all() at 'layers.1'"
    ]


def test_an_engine_is_built_with_a_target(here: Path) -> None:
    result = run("checkpoints", *BATCH, "--target", "torch", "--optimizer", "SGD")
    assert result.exit_code == 0, result.output
    assert " optimizer " in result.output


@pytest.mark.ranks
@pytest.mark.slow
def test_a_mesh_is_observed_beside_its_estimate(here: Path) -> None:
    words = ("schedule", "--mesh", "tp=2", "--target", "torch", "--estimate")
    result = run(*words, *BATCH, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["estimate"]["collectives_agree"]
    (rank,) = found["estimate"]["ranks"]
    assert [one["kind"] for one in rank["collectives"]] == ["all_reduce", "all_reduce"]
    assert [one["rank"] for one in found["ranks"]] == [0, 1]
    memory = rank["memory"]
    assert memory["predicted"]["optimizer"] == memory["seen"]["optimizer"] > 0
    assert memory["seen"]["total"] == pytest.approx(memory["predicted"]["total"], rel=0.05)


class Net(nn.Module):
    """At the top level of a module, for the process of the estimate."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x))).pow(2).mean()


@pytest.mark.ranks
def test_memory_and_collectives_are_predicted_beside_seen(message: Messages) -> None:
    x, sgd = torch.randn(8, 16), partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    sch = slapo.create_schedule(Net(), example_inputs=x)
    sch["first"].checkpoint()
    estimate = sch.estimate(optimizer=sgd)
    elsewhere = sch.estimate(optimizer=sgd, mesh={"dp": 2})
    seen = slapo.observe(slapo.build(sch, optimizer=sgd))
    compared = seen.compare(estimate)
    (one,) = compared.ranks
    assert one.memory[0].by_kind() == one.memory[1].by_kind()
    assert compared.collectives_agree
    assert one.collectives == {}
    assert one.time[1] is not None
    with pytest.raises(ArgumentError) as refused:
        seen.compare(elsewhere)
    message(refused, "another mesh")


def test_collectives_that_were_not_predicted_differ() -> None:
    from slapo_estimate.results import CollectiveCall, Estimate, Memory, RankEstimate
    from slapo_runtime.receipts.observation import Observation, RankObservation
    from slapo_runtime.receipts.watch import Observed

    call = CollectiveCall("all_reduce", "tp", 2, 64, "0", "backward", "", "float32")
    again = CollectiveCall("all_reduce", "tp", 2, 64, "0", "recomputation", "", "float32")
    record = Observed(steps=2)
    record.collectives.update({call: 2, again: 4})
    seen = Observation(2, {"tp": 2}, (RankObservation(0, (), record, Memory(), {}),))
    estimate = Estimate({"tp": 2, "pp": 1}, (RankEstimate(0, (0, 1), Memory(parameters=8), 0, (call,) * 3),))
    assert seen.compare(estimate).collectives_agree  # a step has 1, and 2 that are recomputed
    (one,) = seen.compare(Estimate({"tp": 2}, (RankEstimate(0, (0, 1), Memory(), 0, (call,)),))).ranks
    assert list(one.differing.values()) == [(Collectives(1, 64), Collectives(3, 192))]
    assert "differs" in str(seen.compare(Estimate({"tp": 2}, (RankEstimate(0, (0, 1), Memory(), 0, ()),))))
