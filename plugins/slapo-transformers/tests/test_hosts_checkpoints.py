"""Checkpoints of a Trainer: readable by transformers, resumed under any layout and by the plain Trainer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import slapo_core as slapo
from slapo_runtime.launcher import run_process, run_ranks
from slapo_transformers.checkpoints import write_manifest

from .training_runs import arguments, assert_equal_logs, log, model, plain, samples, scheduled

Result = tuple[list[dict[str, float]], dict[str, Any], Any]
OPTIONS: dict[str, Any] = {
    "save_strategy": "steps",
    "save_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "accuracy",
    "save_total_limit": 2,
}


def result(run: Any, weights: dict[str, Any]) -> Result:
    """The log lines, the weights, and predictions of a run; its mean loss begins where it was resumed."""
    lines = [{key: value for key, value in line.items() if key != "train_loss"} for line in log(run)]
    return lines, weights, run.predict(samples(6, seed=5)).predictions


def run_plain(name: str, directory: Path, *, resume: Path | None = None) -> Result:
    run = plain(name, arguments(directory, gradient_accumulation_steps=2, **OPTIONS))
    run.train(resume_from_checkpoint=None if resume is None else str(resume))
    return result(run, {key: value.clone() for key, value in run.model.state_dict().items()})


def run_scheduled(
    name: str, directory: Path, mesh: dict[str, int], *, fsdp: bool = False, resume: Path | bool | None = None
) -> Result:
    steps = 2 // mesh.get("dp", 1)
    run = scheduled(name, arguments(directory, gradient_accumulation_steps=steps, **OPTIONS), mesh, fsdp=fsdp)
    run.train(resume_from_checkpoint=str(resume) if isinstance(resume, Path) else resume)
    return result(run, slapo.state_dict(run.schedule))


def plain_runs(place: Path, name: str) -> Result:
    """An uninterrupted run."""
    return run_plain(name, place / "plain")


def drawn(run: Any, checkpoint: Path) -> float:
    """The first number after an RNG state was loaded."""
    run._load_rng_state(str(checkpoint))
    return float(torch.rand(()))


def rng_on_two_ranks(place: Path) -> tuple[float, float]:
    """Save a state of its own on each rank; the next number, and the one after loading."""
    run = scheduled("llama", arguments(place / "tp"), {"tp": 2})
    torch.manual_seed(torch.distributed.get_rank())
    run._save_rng_state(str(place / "rng"))
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        write_manifest(place / "rng", run.schedule.mesh)
    expected = float(torch.rand(()))
    torch.distributed.barrier()
    return expected, drawn(run, place / "rng")


def on_two_ranks(place: Path, name: str) -> tuple[Result, Result]:
    """An uninterrupted run, and one that goes on at its second step."""
    whole = run_scheduled(name, place / "tp", {"tp": 2})
    if torch.distributed.get_rank() == 0:
        shutil.copytree(place / "tp" / "checkpoint-2", place / "again" / "checkpoint-2")
        shutil.copytree(place / "tp" / "checkpoint-4", place / "again" / "checkpoint-4")
        (place / "again" / "checkpoint-4" / "slapo.json").unlink()  # a save that was ended midway
    torch.distributed.barrier()
    return whole, run_scheduled(name, place / "again", {"tp": 2}, resume=True)


def on_four_ranks(place: Path, name: str) -> tuple[list[Result], float]:
    """Runs over replicas that go on from the plain Trainer, and in shards from tp; the last one leaves a checkpoint."""
    mesh = {"dp": 2, "tp": 2}
    results = [
        run_scheduled(name, place / "dp_plain", mesh, resume=place / "plain" / "checkpoint-2"),
        run_scheduled(name, place / "fsdp", mesh, fsdp=True, resume=place / "tp" / "checkpoint-2"),
        run_scheduled(name, place / "fsdp_whole", mesh, fsdp=True),
    ]
    return results, drawn(scheduled(name, arguments(place / "rng"), mesh), place / "rng")


def plain_again(place: Path, name: str, kinds: list[str]) -> list[Result]:
    """Plain runs that go on from checkpoints of others."""
    return [run_plain(name, place / f"plain_{kind}", resume=place / kind / "checkpoint-2") for kind in kinds]


def assert_equal_results(found: Result, expected: Result) -> None:
    assert_equal_logs(found[0], expected[0])
    assert list(found[1]) == list(expected[1])
    for key, value in expected[1].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-8, atol=1e-10, msg=key)
    torch.testing.assert_close(torch.as_tensor(found[2]), torch.as_tensor(expected[2]), rtol=1e-8, atol=1e-10)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "replicas"),
    [
        ("llama", False),
        pytest.param("llama", True, marks=pytest.mark.breadth),
        pytest.param("gpt2", True, marks=pytest.mark.breadth),
    ],
    ids=["llama over tp", "llama", "gpt2"],
)
def test_runs_resume_under_any_layout_and_by_the_plain_trainer(name: str, replicas: bool, tmp_path: Path) -> None:
    expected = run_process(plain_runs, tmp_path, name)
    for whole, again in run_ranks(on_two_ranks, tmp_path, name, world_size=2):
        assert_equal_results(whole, expected)
        assert again[0] == whole[0]
        assert all(torch.equal(value, whole[1][key]) for key, value in again[1].items())
    checkpoint = tmp_path / "tp" / "checkpoint-2"
    assert {file.name for file in checkpoint.glob("rng_state*")} == {"rng_state_tp0.pth", "rng_state_tp1.pth"}
    manifest = json.loads((checkpoint / "slapo.json").read_text())
    files = sorted(file.name for file in checkpoint.iterdir() if file.name != "slapo.json")
    assert manifest == {"format": 1, "mesh": {"tp": 2}, "files": files}
    read, other = (
        type(model(name)).from_pretrained(tmp_path / kind / "checkpoint-4", dtype=torch.float64).state_dict()
        for kind in ("tp", "plain")
    )
    torch.testing.assert_close(dict(read), dict(other), rtol=1e-8, atol=1e-10)
    saved = run_ranks(rng_on_two_ranks, tmp_path, world_size=2)
    assert [loaded for _, loaded in saved] == [number for number, _ in saved]
    if replicas:
        for rank, (results, number) in enumerate(run_ranks(on_four_ranks, tmp_path, name, world_size=4)):
            assert number == saved[rank % 2][0]  # at the same place along tp
            for found in results:
                assert_equal_results(found, expected)
    for found in run_process(plain_again, tmp_path, name, ["tp", "fsdp_whole"] if replicas else ["tp"]):
        assert_equal_results(found, expected)
