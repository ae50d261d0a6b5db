"""``slapo verify``: the batch made for a model, exit statuses, and the answer as JSON."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from slapo_core.cli.main import make_app

SOURCE = """
import torch
from torch import nn
import slapo_core as slapo

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(50, 16)
        self.fc1, self.act, self.fc2 = nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)

    def forward(self, ids):
        return self.fc2(self.act(self.fc1(self.tokens(ids))))

class WithTargets(Model):
    def forward(self, ids, targets=None):
        logits = super().forward(ids)
        return logits if targets is None else nn.functional.mse_loss(logits, targets)

def right(sch):
    sch["fc1"].shard(["weight", "bias"], axis=0).sync("backward")
    sch["fc2"].shard("weight", axis=1).sync("forward")

def wrong(sch):
    sch["fc1"].shard(["weight", "bias"], axis=0).sync("backward")
    sch["fc2"].shard("weight", axis=1)

class Infinite(nn.ReLU):
    def forward(self, x):
        return super().forward(x) / 0

def infinite():
    sch = alone()
    sch["act"].replace(Infinite())
    return sch

def other_activation():
    sch = alone()
    sch["act"].replace(nn.GELU())
    return sch

def needs_example_inputs(sch):
    if sch.example_inputs is None:
        raise ValueError("no example inputs")
    right(sch)

def alone():
    return slapo.create_schedule(Model(), example_inputs=torch.tensor([[1, 2, 3]]))

def batch():
    return {"ids": torch.tensor([[1, 2, 49]])}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "tiny_verified.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("tiny_verified", None)


def run(schedule: str, *words: str) -> Result:
    return CliRunner().invoke(make_app(), ["verify", f"tiny_verified:{schedule}", *words])


MODEL = ("--model", "tiny_verified:Model")


@pytest.mark.ranks
def test_exit_status_on_a_mesh(here: Path) -> None:
    right = run("needs_example_inputs", *MODEL, "--mesh", "tp=2", "--json")
    assert right.exit_code == 0, (right.output, right.exception)
    found = json.loads(right.stdout)
    assert (found["passed"], found["mesh"], found["report"]["world_size"]) == (True, {"tp": 2}, 2)
    assert found["batch"] == "made for the first layer, Embedding(50, 16): ids (3, 12) int64"
    assert "verifying: 4 steps on 2 processes" in right.stderr
    wrong = run("wrong", *MODEL, "--mesh", "tp=2", "--batch", "ids=2x5:int64", "--json")
    assert wrong.exit_code == 1
    found = json.loads(wrong.stdout)
    assert (found["passed"], found["batch"]) == (False, "--batch ids=2x5:int64")
    assert found["error"]["tensor"] == "output"
    assert found["error"]["steps"] == ["#3 shard('weight', axis=1) at 'fc2'"]


def test_exit_status_without_a_mesh(here: Path) -> None:
    for schedule, words, how in (
        ("alone", (), "the schedule's example_inputs"),
        ("alone", ("--batch", "tiny_verified:batch"), "--batch tiny_verified:batch"),
        ("Model", ("--batch", "2x5:int64"), "--batch 2x5:int64"),
        (
            "WithTargets",
            (),
            "made for the first layer, Embedding(50, 16): ids (3, 12) int64; without targets, so what needs them does "
            "not run: --batch gives them",
        ),
    ):
        done = run(schedule, *words)
        assert done.exit_code == 0, (done.output, done.exception)
        assert re.match(r"verified: (Model|WithTargets) with 0 steps", done.stdout)
        assert f"  batch: {how}\n" in done.stdout
    infinite = run("infinite", "--json")
    assert infinite.exit_code == 1
    json.loads(infinite.stdout, parse_constant=pytest.fail)  # NaN and Infinity are not JSON
    differs = run("other_activation")
    assert differs.exit_code == 1
    assert differs.stdout == ""
    assert "error: not verified: " in differs.stderr
    assert "replace" in differs.stderr
