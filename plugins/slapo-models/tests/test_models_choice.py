"""The choice of a mesh: what fits, the fastest, ties; the command and its study."""

from __future__ import annotations

import dataclasses
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
from slapo_models.choice.commands import as_plain, python_of
from slapo_models.choice.search import Candidate, Choice, auto_schedule, divisors, largest_profiled, ordered
from slapo_models.choice.study import study_source
from slapo_tune.space import Space

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-4)
WIDTH, LENGTH = 64, 4096


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


@pytest.fixture(scope="module")
def choices() -> tuple[Choice, Choice]:
    """For small weights and long sequences, without and with a limit of memory."""
    batch = ids(1, LENGTH)
    free = auto_schedule(on_meta(), batch, devices=2, memory="1TiB", optimizer=ADAMW, schedule=steps)
    return free, auto_schedule(on_meta(), batch, devices=2, memory="512MiB", optimizer=ADAMW, schedule=steps)


@pytest.mark.ranks
def test_long_sequences_are_fitted_where_a_solver_without_activations_exceeds_memory(
    choices: tuple[Choice, Choice],
) -> None:
    """The fastest step fits by its parameters, and not by its activations; both peaks are those of the estimate."""
    free, ours = choices
    parameters = 4 * sum(one.numel() * one.element_size() for one in on_meta().parameters())  # with Adam's state
    limit = ours.memory or 0

    def peak(choice: Choice) -> int:
        found: Any = choice.schedule.estimate(ids(1, LENGTH), optimizer=ADAMW, **choice.options)
        return int(found.memory.total)

    assert parameters < limit < peak(free)
    assert peak(ours) <= limit
    assert ours.best.prediction.checkpointed
    assert ("pp=2", "a replica has 1 sample for 2 stages") in ours.refused
    assert free.best.prediction.memory == pytest.approx(peak(free), rel=0.02)


@pytest.mark.ranks
def test_the_choice_as_python_gives_the_records(choices: tuple[Choice, Choice]) -> None:
    for choice in choices:
        printed: dict[str, Any] = {}
        exec(python_of(choice), printed)
        again = slapo.create_schedule(net(), mesh=printed["MESH"])
        printed["schedule"](again)
        assert again.records == choice.schedule.records
        assert printed["OPTIONS"] == choice.options
        assert as_plain(choice)["candidates"][0]["options"] == json.loads(json.dumps(choice.options))
        assert str(choice).splitlines()[1].startswith(choice.best.row()[0])


@pytest.mark.ranks
def test_the_command_prints_the_table_and_why_meshes_are_left_out(
    choices: tuple[Choice, Choice], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = dataclasses.replace(choices[1], refused=(("tp=2", "no parameter is split over tp"),))
    monkeypatch.setattr("slapo_models.choice.search.auto_schedule", lambda *args, **kwargs: choice)
    done = CliRunner().invoke(make_app(), ["suggest", "mine:net", "--devices", "2", *BATCH])
    assert done.stdout == f"{choice}\n"
    assert done.stdout.splitlines()[-1] == "  tp=2: no parameter is split over tp"


@pytest.mark.ranks
def test_the_study_of_a_choice_makes_its_schedule(
    choices: tuple[Choice, Choice], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(here))
    ours = choices[1]
    words = [f"1x{LENGTH}x{WIDTH}:float32"]
    source = study_source(ours, model="mine:net", batch=words, schedule="mine:steps", optimizer="AdamW", loss=None)
    space: dict[str, Any] = {}
    exec(source, space)
    study = space["study"]
    points = list(Space(study.space).points())
    best = ours.best
    point = next(each for each in points if each["checkpoint"] == len(best.prediction.checkpointed))
    assert study.mesh(point) == best.mesh
    assert study.world_size == 2
    assert study.memory == ours.memory
    sch = slapo.create_schedule(net(), mesh=study.mesh(point), example_inputs=study.batch(point))
    study.schedule(sch, point)
    assert sch.records == ours.schedule.records


@pytest.mark.ranks
def test_nothing_fits_is_an_error_with_the_least_memory() -> None:
    with pytest.raises(FitError) as caught:
        auto_schedule(on_meta(), ids(2, 16), devices=1, memory="64KiB", optimizer=ADAMW, schedule=steps)
    assert caught.value.target == 64 * 1024
    assert caught.value.least > 64 * 1024
    assert "one device" in caught.value.message


@pytest.mark.ranks
def test_a_mesh_on_which_the_schedule_does_not_run_is_refused_and_the_others_are_compared() -> None:
    def wrong(sch: Any) -> None:
        steps(sch)
        if sch.mesh.size("tp") > 1:
            sch["blocks.*.out"].shard("weight", axis=1)  # its input is full

    choice = auto_schedule(on_meta(), ids(2, 16), devices=2, optimizer=ADAMW, schedule=wrong)
    assert {candidate.layout.tp for candidate in choice.candidates} == {1}
    (reason,) = (text for name, text in choice.refused if name == "tp=2")
    assert "the schedule does not run" in reason
    assert "tp=2: the schedule does not run" in str(choice)


def candidate(time: float, steps: int, dp: int = 1) -> Candidate:
    return Candidate(Layout(1, 1, dp, False, 1), 1, Prediction(time, 1, 1, (), ()), steps)


def test_of_equal_times_the_fewest_steps_win_and_the_rest_is_by_time() -> None:
    fast, plain, slow = candidate(1.0, 9), candidate(1.04, 2, 2), candidate(1.06, 1, 4)
    assert ordered([slow, fast, plain]) == [plain, fast, slow]
    assert ordered([]) == []


@pytest.mark.parametrize(("samples", "size"), [(1, 1), (17, 17), (12, 12), (64, 16), (51, 3)])
def test_profiled_sizes_are_two_wherever_there_are_two(samples: int, size: int) -> None:
    assert largest_profiled(divisors(samples)) == size


class Counting(Net):
    """It counts its blocks by itself, so that it does not run with fewer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(8):
            x = self.blocks[number](x)
        return x.square().mean()


@pytest.mark.ranks
@pytest.mark.breadth
def test_a_model_that_needs_all_blocks_is_predicted_with_all_blocks() -> None:
    with torch.device("meta"):
        model = Counting()
    told: list[str] = []
    batch = ids(1, 64)
    choice = auto_schedule(model, batch, devices=1, optimizer=ADAMW, schedule=steps, tell=told.append)
    found: Any = choice.schedule.estimate(batch, optimizer=ADAMW)
    assert "tp=1, micro-batches of 1, with all blocks" in told
    assert choice.best.prediction.memory == pytest.approx(found.memory.total, rel=0.02)


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
    (tmp_path / "mine.py").write_text(Path(__file__).read_text().split("@pytest.fixture")[0])
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
