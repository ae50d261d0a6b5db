"""The choice of a mesh: what fits, the fastest, ties; the command and its study."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

import slapo_core as slapo
from slapo_core.cli.main import make_app
from slapo_core.errors import ArgumentError, FitError
from slapo_estimate.composition import Layout, Prediction
from slapo_models.choice.commands import as_plain
from slapo_models.choice.search import Candidate, auto_schedule, divisors, ordered
from slapo_tune.space import Space

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-4)
WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = x + self.out((q @ k.transpose(-1, -2) / 8).softmax(-1) @ v)
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, blocks: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def net() -> Net:
    return Net()


def steps(sch: Any) -> None:
    """Split the MLPs."""
    if sch.mesh.size("tp") > 1:
        sch["blocks.*.up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        sch["blocks.*.down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def on_meta() -> Net:
    with torch.device("meta"):
        return Net()


def ids(samples: int, length: int) -> torch.Tensor:
    return torch.empty(samples, length, WIDTH, device="meta")


@pytest.mark.ranks
def test_long_sequences_are_fitted_where_a_solver_without_activations_exceeds_memory() -> None:
    """Small weights and long sequences: the fastest step fits by its parameters, and not by its activations."""
    batch = ids(1, 4096)
    free = auto_schedule(on_meta(), batch, devices=2, memory="1TiB", optimizer=ADAMW, schedule=steps)
    limit = "512MiB"
    ours = auto_schedule(on_meta(), batch, devices=2, memory=limit, optimizer=ADAMW, schedule=steps)
    parameters = 4 * sum(one.numel() * one.element_size() for one in on_meta().parameters())  # with Adam's state
    assert parameters < ours.memory  # type: ignore[operator]

    def peak(sch: slapo.Schedule, candidate: Candidate) -> int:
        found: Any = sch.estimate(batch, optimizer=ADAMW, **candidate.options)
        return int(found.memory.total)

    assert peak(free.schedule, free.best) > ours.memory  # type: ignore[operator]
    assert peak(ours.schedule, ours.best) <= ours.memory  # type: ignore[operator]
    assert ours.best.prediction.checkpointed


@pytest.mark.ranks
def test_nothing_fits_is_an_error_with_the_least_memory() -> None:
    with pytest.raises(FitError) as caught:
        auto_schedule(on_meta(), ids(2, 16), devices=1, memory="64KiB", optimizer=ADAMW, schedule=steps)
    assert caught.value.target == 64 * 1024
    assert caught.value.least > 64 * 1024
    assert "one device" in caught.value.message


def candidate(time: float, steps: int, dp: int = 1) -> Candidate:
    return Candidate(Layout(1, 1, dp, False, 1), 1, Prediction(time, 1, 1, (), ()), steps)


def test_of_equal_times_the_fewest_steps_win_and_the_rest_is_by_time() -> None:
    fast, plain, slow = candidate(1.0, 9), candidate(1.005, 2, 2), candidate(1.02, 1, 4)
    assert ordered([slow, fast, plain]) == [plain, fast, slow]
    assert ordered([]) == []


def test_divisors_ascend() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"devices": 0}, "positive number"),
        ({"devices": True}, "positive number"),
        ({"devices": 2, "device": "v100"}, "a100, h100"),
        ({"devices": 2, "memory": "70Gb"}, "memory"),
    ],
    ids=["zero", "bool", "device", "memory"],
)
def test_wrong_arguments_are_refused(arguments: Any, word: str) -> None:
    with pytest.raises(ArgumentError, match=word):
        auto_schedule(on_meta(), ids(2, 4), schedule=steps, **arguments)


def test_a_model_without_repeated_blocks_is_refused() -> None:
    with pytest.raises(ArgumentError, match="no repeated blocks"):
        auto_schedule(nn.Linear(4, 4), torch.randn(2, 4), devices=2, schedule=steps)


BATCH = ("--batch", f"4x32x{WIDTH}:float32")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(Path(__file__).read_text().split("@pytest.mark")[0])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ("mine:net", "--devices", "2"),
        ("mine:net", "--devices", "0", *BATCH),
        ("mine:nothing", "--devices", "2", *BATCH),
        ("mine", "--devices", "2", *BATCH),
        ("mine:net", "--devices", "2", *BATCH, "--json", "--python"),
        ("mine:net", "--devices", "2", "--batch", "many"),
        ("mine:net", "--devices", "2", *BATCH, "--study", "mine.py"),
        ("mine:net", "--devices", "2", *BATCH, "--memory", "70Gb"),
    ],
    ids=["batch", "devices", "function", "module", "both", "shape", "exists", "memory"],
)
def test_bad_input_exits_with_2(here: Path, words: tuple[str, ...]) -> None:
    found = CliRunner().invoke(make_app(), ["suggest", *words])
    assert found.exit_code == 2, found.output


@pytest.mark.ranks
@pytest.mark.slow
def test_the_commands_python_gives_the_records_and_its_study_loads(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["mine:net", "--schedule", "mine:steps", "--devices", "4", *BATCH, "--memory", "3MiB"]
    monkeypatch.syspath_prepend(str(here))
    found = CliRunner().invoke(make_app(), ["suggest", *words, "--python", "--study", "study.py"])
    assert found.exit_code == 0, found.output
    assert "suggesting: tp=2" in found.stderr
    printed: dict[str, Any] = {}
    exec(found.stdout, printed)
    space: dict[str, Any] = {}
    exec((here / "study.py").read_text(), space)
    study = space["study"]
    point = next(iter(Space(study.space).points()))
    sch: Any = slapo.create_schedule(net(), mesh=study.mesh(point), example_inputs=study.batch(point))
    study.schedule(sch, point)
    choice = auto_schedule(
        net(), torch.zeros(4, 32, WIDTH), devices=4, memory="3MiB", optimizer=torch.optim.AdamW, schedule=steps
    )
    again = slapo.create_schedule(net(), mesh=printed["MESH"])
    printed["schedule"](again)
    assert again.records == choice.schedule.records
    assert printed["OPTIONS"] == choice.options
    assert as_plain(choice)["candidates"][0]["options"] == json.loads(json.dumps(choice.options))
