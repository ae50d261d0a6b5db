"""A step that fails on one rank ends on all of them, and each says which one failed, where, and why."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import slapo_core as slapo
from slapo_core.testing import run_ranks
from tests import failing_pipelines as failing

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


def test_every_rank_ends_with_the_error_of_the_guilty_one() -> None:
    ranks = run_ranks(on_rank, {"pp": 3}, world_size=3)
    no_gradient = (f"stage 2 in the loss of micro-batch 0: {failing.NO_GRADIENT}", "BuildError")
    expected = {
        "forward": ("stage 1 in the forward of micro-batch 0: ValueError: no more forward", "ValueError"),
        "backward": ("stage 0 in the backward of micro-batch 0: KeyError: 'no way back'", "KeyError"),
        "loss": ("stage 2 in the loss of micro-batch 0: ZeroDivisionError: no samples", "ZeroDivisionError"),
        "optimizer": ("the step of the optimiser: OverflowError: no step", "OverflowError"),
        "second step": ("stage 0 in the forward of micro-batch 0: ValueError: no more forward", "ValueError"),
        "detached": no_gradient,
        "frozen": no_gradient,
    }
    for rank, told in enumerate(ranks):
        assert list(told) == list(GUILTY)
        for where, one in told.items():
            (text, kind), guilty = expected[where], GUILTY[where]
            assert one.message.startswith(f"a step failed on rank {guilty}, {text}"), (where, one.message)
            assert one.message.endswith(")")  # the place in a file
            assert one.first == guilty
            assert one.cause == kind or rank != guilty
            assert one.seconds < 60  # far from the timeout of the groups, which is minutes
            assert one.after.startswith(f"the engine is closed, because a step failed on rank {guilty}, ")


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
            assert unprepared.startswith("preparing the step failed on rank 3: ") or rank == 3
            assert failed.startswith(
                "a step failed on rank 3, stage 1 in the forward of micro-batch 0: ValueError: no more forward ("
            )


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


def test_a_rank_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(slapo.RankFailedError, match="rank 1"):
        run_ranks(leaves, str(tmp_path), world_size=3)
    told = [path.read_text() for path in sorted(tmp_path.iterdir())]
    assert told
    assert all("rank 1, no sign of life: the process ended, or hangs" in text for text in told)
