"""examples/megatron_loop.py: a loop of the user's own on megatron.core trains as the reference model does."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_testing import preload_modules, run_ranks
from tests.integration.example_runs import example

pytestmark = pytest.mark.ranks
preload_modules("tests.support.cpu_megatron", "slapo_megatron.engine", "slapo_tp")

LOW = {"bf16": True}


def on_rank(*, only_example: bool) -> dict[str, Any]:
    from megatron.core import parallel_state

    from tests.support.cpu_megatron import install

    install()
    loop = example("megatron_loop")
    losses, weights = loop.train(torch.device("cpu"))
    found: dict[str, Any] = {"losses": losses, "weights": weights}
    if only_example:
        return found
    parallel_state.destroy_model_parallel()
    found["marks left out"] = without_marks(loop)
    parallel_state.destroy_model_parallel()
    found["refused"] = refused()
    found["unwrapped"] = unwrapped()
    return found


def without_marks(loop: Any) -> list[float]:
    """A fault: the norm of all gradients leaves out shards, so that clipping goes by another one."""
    from slapo_megatron import own_loop

    keep = own_loop.mark
    own_loop.mark = lambda context: None  # type: ignore[assignment]
    try:
        losses: list[float] = loop.train(torch.device("cpu"))[0]
    finally:
        own_loop.mark = keep
    return losses


def refused() -> list[str]:
    import slapo_megatron

    said = []
    for mesh, options in (
        ({"pp": 2}, {}),
        ({"tp": 2}, {"ddp_config": {"use_megatron_fsdp": True}}),
        ({"tp": 2}, {"model_parallel_config": {"tensor_model_parallel_size": 4}}),
    ):
        sch = slapo.create_schedule(nn.Linear(4, 4), mesh=mesh)
        with pytest.raises(slapo.BuildError) as error:
            slapo_megatron.model_chunks(sch, **options)
        said.append(str(error.value))
    return said


def unwrapped() -> tuple[str, str, bool, bool]:
    """A module for a script that wraps by itself: in its precision, with marks."""
    import slapo_megatron

    sch = slapo.create_schedule(nn.Linear(4, 4), mesh={"tp": 2})
    sch.shard(["weight", "bias"], axis=0)
    (chunk,) = slapo_megatron.model_chunks(sch, optimizer_config=LOW, wrap=False)
    weight: Any = sch.model.weight
    return type(chunk).__name__, str(weight.dtype), weight.tensor_model_parallel, chunk.config.bf16


@functools.cache
def wanted() -> tuple[list[float], dict[str, torch.Tensor]]:
    losses, weights = example("megatron_loop").reference()
    return losses, weights


def assert_same(ranks: list[dict[str, Any]]) -> None:
    losses, weights = wanted()
    assert losses[-1] < losses[0]
    for rank in ranks:
        assert rank["losses"] == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(rank["weights"], weights, rtol=1e-4, atol=1e-5)


def test_a_loop_of_the_users_own_trains_as_the_reference_model() -> None:
    ranks = run_ranks(on_rank, only_example=False, world_size=2)
    assert_same(ranks)
    for rank in ranks:
        assert rank["marks left out"] != pytest.approx(wanted()[0], rel=1e-4), "the control"
        pipeline, fsdp, size = rank["refused"]
        assert "'pp'" in pipeline
        assert 'target="megatron"' in pipeline
        assert "use_megatron_fsdp" in fsdp
        assert "is 4, but is 2" in size
        assert rank["unwrapped"] == ("Chunk", "torch.bfloat16", True, True)


@pytest.mark.breadth
def test_two_replicas_of_two_shards_train_as_the_reference_model() -> None:
    assert_same(run_ranks(on_rank, only_example=True, world_size=4))
