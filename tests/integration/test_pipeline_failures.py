"""A step that fails on one rank closes the engine there, says where it was, and ends the job."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import slapo_core as slapo
from slapo_testing import run_ranks
from tests.support import failing_pipelines as failing
from tests.tiers import sampled

CASES = {
    "forward": (1, "stage 1 in the forward", "ValueError"),
    "backward": (0, "stage 0 in the backward", "KeyError"),
    "loss": (2, "stage 2 in the loss", "ZeroDivisionError"),
    "optimizer": (1, "the step of the optimizer", "OverflowError"),
    "second step": (0, "stage 0 in the forward", "ValueError"),
    "detached": (2, "stage 2 in the loss", "BuildError"),
    "frozen": (2, "stage 2 in the loss", "BuildError"),
}


def build(mesh: dict[str, int], where: str, guilty: int) -> Any:
    return failing.build(where, guilty, ("first", "second"), mesh, pipeline_schedule="1f1b", microbatches=3)


def on_rank(where: str, guilty: int) -> None:
    torch.set_num_threads(1)
    engine, _ = build({"pp": 3}, where, guilty)
    failing.train_until_it_fails(engine, failing.batch(6), steps=int(where == "second step"))


@pytest.mark.parametrize("where", sampled(CASES))
def test_the_rank_that_failed_is_named_and_where_it_was(where: str) -> None:
    guilty, place, kind = CASES[where]
    error = failing.failure(on_rank, where, guilty, world_size=3)
    assert error.first == guilty
    assert f"{kind}: " in error.failures[guilty]
    assert f"a step of the pipeline failed here: {place}" in error.failures[guilty]


def before_any_rank_waits() -> str:
    """What every rank refuses alike before it waits for another leaves the engine as it was."""
    torch.set_num_threads(1)
    engine, _ = build({"pp": 3}, "", -1)
    first = float(engine.train_step(failing.batch(6)).loss)
    with pytest.raises(slapo.BuildError) as uncut:
        engine.train_step(failing.batch(5))
    assert float(engine.train_step(failing.batch(6)).loss) < first
    return str(uncut.value)


def test_a_batch_that_cannot_be_cut_leaves_the_engine_open() -> None:
    for text in run_ranks(before_any_rank_waits, world_size=3):
        assert "5 samples" in text


def leaves() -> None:
    """Rank 1 ends as a process, without a word."""
    engine, _ = build({"pp": 3}, "", -1)
    engine.train_step(failing.batch(6))
    if dist.get_rank() == 1:
        os._exit(3)
    engine.train_step(failing.batch(6))


def test_a_rank_that_is_gone_is_named() -> None:
    error = failing.failure(leaves, world_size=3)
    assert error.codes[1] == 3
