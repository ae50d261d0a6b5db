"""A step of DeepSpeed's pipeline that fails on a rank closes the engine there, says where it was, and ends the job."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from slapo_testing import run_ranks
from tests.support import failing_pipelines as failing

pytestmark = pytest.mark.ranks

CASES = {
    "forward": (1, "stage 1 in the forward", "ValueError"),
    "backward": (0, "stage 0 in the backward", "KeyError"),
    "optimizer": (1, "step", "OverflowError"),
}


def build(where: str, guilty: int) -> Any:
    config = {"gradient_accumulation_steps": 3}
    return failing.build(where, guilty, ("first", "second"), {"pp": 3}, length=3, target="deepspeed", config=config)


def on_rank(where: str, guilty: int) -> None:
    torch.set_num_threads(1)
    failing.train_until_it_fails(build(where, guilty)[0], failing.batch(6), blocks=3)


@pytest.mark.parametrize("where", CASES)
def test_the_rank_that_failed_is_named_and_where_it_was(where: str) -> None:
    guilty, place, kind = CASES[where]
    error = failing.failure(on_rank, where, guilty, world_size=3)
    assert error.first == guilty
    assert f"{kind}: " in error.failures[guilty]
    assert "a step of the pipeline failed here: " in error.failures[guilty]
    assert place in error.failures[guilty]


def unmade() -> str:
    return failing.unmade(build)


def test_an_optimizer_that_one_rank_cannot_make_ends_the_build_on_all() -> None:
    for text in run_ranks(unmade, world_size=3):
        assert "no numbers" in text


def test_private_names_of_deepspeed_exist() -> None:
    """See private.py and pipeline/module.py."""
    from deepspeed.runtime.pipe import engine

    source = inspect.getsource(engine)
    assert "if self.dynamic_shape or self.first_output_send:" in source
    assert "if self.dynamic_shape or self.pipe_recv_buf is None:" in source
    assert "if self.dynamic_shape or self.grad_layer is None:" in source
    assert "self.fwd_outputs.append(self.loss.detach())" in source
    assert "weight_group_list = self.module.get_tied_weights_and_groups()" in source
