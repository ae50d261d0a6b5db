"""A step of DeepSpeed's pipeline that fails on one rank ends on all of them; each says which one failed, and why."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch

from slapo_core.testing import run_ranks
from tests import failing_pipelines as failing
from tests.messages import Messages

pytestmark = pytest.mark.ranks

GUILTY = {"forward": 1, "backward": 0, "loss": 2, "optimizer": 1, "detached": 2, "frozen": 2}


def on_rank() -> dict[str, Any]:
    torch.set_num_threads(1)
    config = {"gradient_accumulation_steps": 3}
    make = functools.partial(
        failing.build, cuts=("first", "second"), mesh={"pp": 3}, length=3, target="deepspeed", config=config
    )
    told: dict[str, Any] = {}
    for where, guilty in GUILTY.items():
        engine, _ = make(where, guilty)
        told[where] = failing.tell(engine, failing.batch(6), blocks=3)
    return {**told, **failing.tell_of_batches(make, 6)}


def test_every_rank_ends_with_the_error_of_the_guilty_one(message: Messages) -> None:
    ranks = run_ranks(on_rank, world_size=3)
    expected = {
        "forward": ("stage 1 in the forward", "ValueError"),
        "backward": ("stage 0 in the backward", "KeyError"),
        "loss": ("stage 2 in the loss", "ZeroDivisionError"),
        "optimizer": ("step", "OverflowError"),
        "detached": ("stage 2 in the loss", "BuildError"),
        "frozen": ("stage 2 in the loss", "BuildError"),
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
    message(ranks[0]["uncut"], "5 samples", "gradient_accumulation_steps=3")
    for told in ranks:
        assert "no numbers" in told["making"]
        assert "5 samples" in told["uncut"]
        assert told["then"] == ranks[0]["then"] > 0


def test_what_is_taken_of_deepspeed_is_there() -> None:
    """See pipeline/private.py and pipeline/module.py."""
    from deepspeed.runtime.pipe import engine, module, p2p, topology

    assert list(inspect.signature(p2p.send).parameters) == ["tensor", "dest_stage", "async_op"]
    assert list(inspect.signature(p2p.recv).parameters) == ["tensor", "src_stage", "async_op"]
    assert engine.p2p is p2p
    source = inspect.getsource(engine)
    assert "p2p.send(" in source
    assert "if self.dynamic_shape or self.first_output_send:" in source
    assert "if self.dynamic_shape or self.pipe_recv_buf is None:" in source
    assert "if self.dynamic_shape or self.grad_layer is None:" in source
    assert "self.fwd_outputs.append(self.loss.detach())" in source
    assert "weight_group_list = self.module.get_tied_weights_and_groups()" in source
    made = inspect.getsource(module.PipelineModule.__init__) + inspect.getsource(topology.PipelineParallelGrid.__init__)
    assert made.count("new_group(") == 6  # in private.groups_of: one kind has two ways
