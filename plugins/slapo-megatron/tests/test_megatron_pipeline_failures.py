"""A step of Megatron's pipeline that fails on one rank closes the engine there, says where it was, and ends the job."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slapo_testing import run_ranks
from tests.support import failing_pipelines as failing

pytestmark = pytest.mark.ranks

CASES = {
    "forward": (1, "stage 1 in the forward", "ValueError"),
    "reducing": (0, "step", "OverflowError"),
    "optimizer": (1, "step", "OverflowError"),
}


def build(where: str, guilty: int) -> Any:
    cuts = ("first", "second", "third")
    return failing.build(where, guilty, cuts, {"pp": 2}, max_grad_norm=1.0, target="megatron", microbatches=4)


def on_rank(where: str, guilty: int) -> None:
    from tests.support.cpu_megatron import install

    install()
    torch.set_num_threads(1)
    engine, _ = build(where, guilty)
    if where == "reducing" and torch.distributed.get_rank() == guilty:
        engine.megatron.chunks[0].finish_grad_sync = failing.refuse  # the others wait in a group of Megatron's
    failing.train_until_it_fails(engine, failing.batch(8))


@pytest.mark.parametrize("where", CASES)
def test_the_rank_that_failed_is_named_and_where_it_was(where: str) -> None:
    guilty, place, kind = CASES[where]
    error = failing.failure(on_rank, where, guilty, world_size=2)
    assert error.first == guilty
    assert f"{kind}: " in error.failures[guilty]
    assert "a step of the pipeline failed here: " in error.failures[guilty]
    assert place in error.failures[guilty]


def unmade() -> str:
    from tests.support.cpu_megatron import install

    install()
    return failing.unmade(build)


def test_an_optimizer_that_one_rank_cannot_make_ends_the_build_on_all() -> None:
    for text in run_ranks(unmade, world_size=2):
        assert "no numbers" in text
