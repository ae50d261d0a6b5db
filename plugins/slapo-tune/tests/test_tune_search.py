"""A whole search: pruned before it starts, measured, verified, kept, and applied again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core
from slapo_core import Trial
from slapo_tune import Study, StudyError, best, load_study, read_log
from slapo_tune.samplers.program import margin
from slapo_tune.search import Finished, Note, Started, Verified, search
from tests.messages import Messages

pytestmark = pytest.mark.ranks

STUDY = """
import sys
import torch
from torch import nn
import slapo_tune
from parts import Doubled

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return self.second(self.first(x).relu()).square().mean()

def space(s):
    ends = s.choose("ends", ["well", "wrong", "refused"])
    batch = s.choose("batch", [4, 16384, 6])
    s.require(ends == "well" or batch == 4, "one batch is enough")

def schedule(sch, p):
    if p["ends"] == "wrong":
        sch["second"].replace(Doubled(256, 64))
    else:
        sch["first"].shard(["weight", "bias"], axis=5 if p["ends"] == "refused" else 0).sync("bwd_post", "all_reduce")
        sch["second"].shard("weight", axis=1).sync("fwd_post", "all_reduce")

def evaluate(run):
    return run.train() + (1e9 if run.point["ends"] == "wrong" else run.point["batch"] * 1e6)

study = slapo_tune.Study(
    Net, space, schedule, evaluate, world_size=2, mesh=lambda p: {"tp": 2}, memory="2MiB", sampler="exhaustive",
    batch=lambda p: torch.randn(p["batch"], 64), optimizer=lambda q: torch.optim.AdamW(q), log="run.jsonl",
    options=lambda p: {"accumulate": 2} if p["batch"] == 6 else {},
)
"""

PARTS = """
from torch import nn

class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)
"""

SCRIPT = """
import slapo_tune
from torch import nn

def space(s):
    s.choose("batch", [1, 2])

def schedule(sch, p):
    pass

def evaluate(run):
    return run.point["batch"]

{guard}
result = slapo_tune.tune({arguments}, log="run.jsonl", sampler="exhaustive", timeout=100)
print(result.best.value, result.winner.right, result.winner.reason)
"""


SHARDED = """
import torch
from torch import nn
import slapo_tune

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(128, 512), nn.Linear(512, 128)) for _ in range(4))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

def space(s):
    s.choose("sharded", ["no", "option", "marks"])

def schedule(sch, p):
    if p["sharded"] == "marks":
        sch["blocks.*"].fully_shard(reshard_after_forward=False)

study = slapo_tune.Study(
    Net, space, schedule, world_size=2, mesh=lambda p: {"dp": 2}, sampler="exhaustive", log="run.jsonl",
    batch=lambda p: torch.randn(64, 128), optimizer=lambda q: torch.optim.AdamW(q), loss=lambda output, batch: output,
    options=lambda p: {"data_parallel": "fsdp"} if p["sharded"] == "option" else {},
)
"""


@pytest.mark.breadth
def test_shards_over_replicas_are_predicted_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "STUDY.py").write_text(SHARDED)
    trials = search(load_study("STUDY.py"), resume=False).trials
    assert [trial.status for trial in trials] == ["ok"] * 3
    predicted = [trial.predicted["memory"] for trial in trials]
    assert predicted[1] < predicted[2] < predicted[0]
    for trial in trials:
        assert trial.measured["memory"] == pytest.approx(trial.predicted["memory"], rel=0.05)


def test_margin_is_learned_from_measurements() -> None:
    def trial(status: str, predicted: float, measured: float = 0) -> Trial:
        return Trial(0, {}, status, predicted={"memory": predicted}, measured={"memory": measured} if measured else {})

    mib = 1 << 20
    assert margin([], 100) == 1
    assert margin([trial("ok", 100 * mib, 90 * mib)], None) == 1
    assert margin([trial("ok", 100 * mib, 121 * mib), trial("ok", 100 * mib, 111 * mib)], None) == pytest.approx(1.2)
    assert margin([trial("oom", 80 * mib)], 100 * mib) > 1.25  # so that 80 MiB do not fit another time
    assert margin([trial("crash", 80 * mib, 400 * mib)], 100 * mib) == 1
    odd, fine = trial("oom", 4 * mib), trial("ok", 60 * mib, 60 * mib)
    assert margin([odd, fine], 100 * mib) == 1  # the first one failed for another reason


def test_study_of_a_file_is_pruned_run_verified_and_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: Messages
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "STUDY.py").write_text(STUDY)
    (tmp_path / "parts.py").write_text(PARTS)
    events: list[Any] = []
    study = load_study("STUDY.py")
    result = search(study, resume=False, tell=events.append)

    by_point = {tuple(trial.point.values()): trial for trial in result.trials}
    assert {point: trial.status for point, trial in by_point.items()} == {
        ("well", 4): "ok",
        ("well", 16384): "over_memory",
        ("well", 6): "ok",
        ("wrong", 4): "wrong",  # and was the best until it was verified
        ("refused", 4): "refused",
    }
    assert by_point["well", 16384].reason.endswith(" of 2MiB")
    assert by_point["well", 4].measured["memory"] == pytest.approx(by_point["well", 4].predicted["memory"], rel=0.05)
    assert "replace" in by_point["wrong", 4].reason
    started = [event.point for event in events if isinstance(event, Started)]
    assert {tuple(point.values()) for point in started} == {("well", 4), ("well", 6), ("wrong", 4)}
    assert [type(event) for event in events if not isinstance(event, Started)] == [Finished] * 5 + [Verified] * 2
    assert read_log("run.jsonl").trials == result.trials
    assert all(result.seconds[part] > 0 for part in ("trials", "predictions", "verification"))

    winner = best("run.jsonl")
    assert winner == result.winner
    assert (winner.point, winner.right) == ({"ends": "well", "batch": 6}, True)
    assert winner.text.startswith("verified: Net with 4 steps agrees with the reference model (2 ranks")
    with torch.device("meta"):
        schedule = winner.apply(study.make_model())
    assert schedule.document()["records"] == winner.document["records"]  # type: ignore[index]
    assert schedule.is_verified

    again = search(study, resume=True, tell=events.append)
    assert again == result
    with pytest.raises(slapo_core.SlapoError) as caught:
        search(study, resume=False)
    message(caught, "already has trials", "slapo tune resume STUDY.py")
    assert not [event for event in events if isinstance(event, Note)]


@pytest.mark.breadth
@pytest.mark.parametrize("is_guarded", [True, False])
def test_script_tunes_its_own_functions(tmp_path: Path, is_guarded: bool, message: Messages) -> None:
    guard = 'if __name__ == "__main__":' if is_guarded else "if True:"
    lines = SCRIPT.format(guard=guard, arguments="lambda: nn.Linear(2, 2), space, schedule, evaluate").splitlines()
    at = lines.index(guard)
    if is_guarded:
        lines = [line.replace("lambda: nn.Linear(2, 2)", "model") for line in lines]
        lines.insert(at, "def model():\n    return nn.Linear(2, 2)\n")
        at += 1
    else:
        lines = [line.replace("lambda: nn.Linear(2, 2)", "nn.Identity") for line in lines]
    (tmp_path / "script.py").write_text("\n".join([*lines[: at + 1], *(f"    {line}" for line in lines[at + 1 :])]))
    ran = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    if is_guarded:
        message(ran.stdout, "2.0 None ", "no batch")
        assert ran.returncode == 0
    else:
        assert ran.stderr.count("\nslapo_tune.errors.StudyError: a trial imported the script, and") == 1
        assert "if __name__ == '__main__':" in ran.stderr
        assert not read_log(tmp_path / "run.jsonl").trials


def test_unnamed_function_is_refused_before_trials(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    functions = lambda: nn.Identity(), lambda s: s.choose("n", [1]), lambda sch, p: None, lambda run: 1.0
    study = Study(*functions, log=log, sampler="exhaustive")
    with pytest.raises(StudyError, match=r"^make_model=.* cannot be sent ") as caught:
        search(study)
    assert "top level" in str(caught.value.hint)
    assert not log.exists()
