"""A step that fails on one rank ends on all of them, and each says which one failed, where, and why."""

from __future__ import annotations

import contextlib
import os
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import slapo_core as slapo
from slapo_core.ranks import launcher
from slapo_core.testing import run_ranks
from tests import failing_pipelines as failing
from tests.messages import Messages

GUILTY = {
    "forward": 1,
    "backward": 0,
    "loss": 2,
    "optimizer": 1,
    "second step": 0,
    "detached": 2,
    "frozen": 2,
}


def build(mesh: dict[str, int], schedule: str, where: str, guilty: int) -> Any:
    cuts = ("first", "second", "third")[: 2 + ("tp" in mesh or "dp" in mesh)]
    return failing.build(where, guilty, cuts, mesh, pipeline_schedule=schedule, microbatches=3)


def on_rank(mesh: dict[str, int]) -> dict[str, failing.Told]:
    torch.set_num_threads(1)
    told = {}
    for where, guilty in GUILTY.items():
        engine, _ = build(mesh, "1f1b", where, guilty)
        told[where] = failing.tell(engine, failing.batch(6), steps=int(where == "second step"))
    return told


def test_every_rank_ends_with_the_error_of_the_guilty_one(message: Messages) -> None:
    ranks = run_ranks(on_rank, {"pp": 3}, world_size=3)
    expected = {
        "forward": ("stage 1 in the forward", "ValueError"),
        "backward": ("stage 0 in the backward", "KeyError"),
        "loss": ("stage 2 in the loss", "ZeroDivisionError"),
        "optimizer": ("the step of the optimiser", "OverflowError"),
        "second step": ("stage 0 in the forward", "ValueError"),
        "detached": ("stage 2 in the loss", "BuildError"),
        "frozen": ("stage 2 in the loss", "BuildError"),
    }
    for where, guilty in GUILTY.items():
        place, kind = expected[where]
        (text,) = {failing.without_line(told[where].message) for told in ranks}
        message(text, f"a step failed on rank {guilty}, ", place, f": {kind}: ")
    for rank, told in enumerate(ranks):
        assert list(told) == list(GUILTY)
        for where, one in told.items():
            (_, kind), guilty = expected[where], GUILTY[where]
            assert one.message.endswith(")")  # the place in a file
            assert one.first == guilty
            assert one.cause == kind or rank != guilty
            assert one.after.startswith("the engine is closed")
            assert f"a step failed on rank {guilty}, " in one.after


def on_four() -> list[tuple[str, ...]]:
    torch.set_num_threads(1)
    told = []
    for mesh in ({"dp": 2, "pp": 2}, {"pp": 2, "tp": 2}):
        engine, net = build(mesh, "interleaved_1f1b", "preparing", 3)
        with pytest.raises(slapo.SlapoError) as unprepared:
            engine.train_step(failing.batch(6))
        failing.fail(net, "", 3)
        engine.train_step(failing.batch(6))  # it is open, and in step
        failing.fail(net, "forward", 3)
        with pytest.raises(slapo.RankFailedError) as failed:
            engine.train_step(failing.batch(6))
        told.append((type(unprepared.value).__name__, str(unprepared.value), str(failed.value)))
    return told


def test_replicas_and_tensor_parallel_ranks_hear_of_it_too() -> None:
    for rank, both in enumerate(run_ranks(on_four, world_size=4)):
        for kind, unprepared, failed in both:
            assert "ValueError: no stages" in unprepared
            assert (kind == "BuildError") == (rank != 3)  # where it failed it is what it was
            assert "failed on rank 3: " in unprepared or rank == 3
            assert "a step failed on rank 3, stage 1 in the forward" in failed
            assert "ValueError: no more forward (" in failed


def leaves(directory: str) -> str:
    """Rank 1 ends as a process, without a word."""
    engine, _ = build({"pp": 3}, "1f1b", "", -1)
    engine.train_step(failing.batch(6))
    if dist.get_rank() == 1:
        os._exit(3)
    try:
        engine.train_step(failing.batch(6))
    except slapo.RankFailedError as error:
        Path(directory, str(dist.get_rank())).write_text(str(error))
    return ""


def test_a_rank_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_GRACE", 300.0)  # for the others to write down what they raise
    with pytest.raises(slapo.RankFailedError, match="rank 1"):
        run_ranks(leaves, str(tmp_path), world_size=3)
    told = [path.read_text() for path in sorted(tmp_path.iterdir())]
    assert len(told) == 2
    assert all("rank 1, no sign of life: " in text for text in told)


@pytest.mark.parametrize("package", ["slapo_core.native", "slapo_deepspeed", "slapo_megatron"])
def test_an_interrupted_step_closes_the_engine(package: str) -> None:
    """Its groups are gone: a later step would fail in the middle of them."""
    engine_class = import_module(f"{package}.pipeline.engine").PipelineEngine
    engine = engine_class.__new__(engine_class)
    closed: list[bool] = []
    engine._at, engine._reason, engine.close = "nothing", None, lambda: closed.append(True)
    engine._groups = SimpleNamespace(step=lambda at: contextlib.nullcontext(), group=lambda mesh_dim: None)
    engine._lease = SimpleNamespace(spoil=lambda: closed.append(True))
    engine.deepspeed = SimpleNamespace(device="cpu")
    with pytest.raises(KeyboardInterrupt), engine._step():
        raise KeyboardInterrupt
    assert len(closed) == (2 if package == "slapo_megatron" else 1)
    with pytest.raises(slapo.BuildError, match="the engine is closed, because a step was ended by KeyboardInterrupt"):
        engine._require_open()
