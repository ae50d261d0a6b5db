"""A step of Megatron's pipeline that fails on one rank ends on all of them; each says which one failed, and why."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from slapo_core.testing import run_ranks
from tests import failing_pipelines as failing
from tests.messages import Messages

pytestmark = pytest.mark.ranks

GUILTY = {"forward": 1, "backward": 0, "loss": 1, "reducing": 0, "optimizer": 1, "detached": 1, "frozen": 1}
ONCE = ("second",)
TWICE = ("first", "second", "third")
MESH = {"pp": 2}


def on_rank(cuts: tuple[str, ...]) -> dict[str, Any]:
    from tests.cpu_megatron import install

    install()
    torch.set_num_threads(1)
    return failures(cuts)


def failures(cuts: tuple[str, ...]) -> dict[str, Any]:
    options = {"target": "megatron", "microbatches": 4}
    told: dict[str, Any] = {}
    for where, guilty in GUILTY.items():
        engine, _ = failing.build(where, guilty, cuts, MESH, max_grad_norm=1.0, **options)
        if where == "reducing" and torch.distributed.get_rank() == guilty:
            engine.megatron.chunks[0].finish_grad_sync = failing.refuse  # the others wait in a group of Megatron's
        told[where] = failing.tell(engine, failing.batch(8))
    make = functools.partial(failing.build, cuts=cuts, mesh=MESH, **options)
    return {**told, **failing.tell_of_batches(make, 8)}


@pytest.mark.parametrize("cuts", [pytest.param(ONCE, marks=pytest.mark.breadth), TWICE])
def test_every_rank_ends_with_the_error_of_the_guilty_one(cuts: tuple[str, ...], message: Messages) -> None:
    ranks = run_ranks(on_rank, cuts, world_size=2)
    last = len(cuts)
    expected = {
        "forward": ("stage 1 in the forward", "ValueError"),
        "backward": (f"stage {last - 1} in the backward", "KeyError"),
        "loss": (f"stage {last} in the loss", "ZeroDivisionError"),
        "reducing": ("step", "OverflowError"),
        "optimizer": ("step", "OverflowError"),
        "detached": (f"stage {last} in the loss", "BuildError"),
        "frozen": (f"stage {last} in the loss", "BuildError"),
    }
    for where, guilty in GUILTY.items():
        place, cause = expected[where]
        text = failing.without_line(ranks[guilty][where].message)
        message(text, f"a step failed on rank {guilty}, ", place, f": {cause}: ")
        for rank, told in enumerate(ranks):
            one = told[where]
            assert text in one.message, (where, rank, one.message)
            assert (one.cause == cause) is (rank == guilty)
            assert one.first == guilty
            assert text in one.after
    for told in ranks:
        assert "no numbers" in told["making"]
        assert "7 samples" in told["uncut"]
        assert "microbatches=4" in told["uncut"]
        assert told["then"] == ranks[0]["then"] > 0
