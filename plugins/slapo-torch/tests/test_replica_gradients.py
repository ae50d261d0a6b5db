"""Gradients of a pipeline's replicas are averaged without overflow, and sent while other stages still run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
from slapo_runtime.flat_shards import buckets
from slapo_runtime.launcher import run_ranks
from slapo_torch.replica_gradients import GradientAverage
from tests.support import staged

ELEMENTS = 5


def parameter(value: float | None, dtype: torch.dtype = torch.float16) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(2, ELEMENTS, dtype=dtype))
    if value is not None:
        made.grad = torch.full_like(made, value)
    return made


def average(parameters: list[nn.Parameter], bucket_bytes: int = 1 << 20) -> None:
    exchange = GradientAverage(dist.group.WORLD, bucket_bytes=bucket_bytes)
    exchange.begin(parameters)
    exchange.finish()


def on_two() -> dict[str, Any]:
    rank = dist.get_rank()
    large = [parameter(4e4), parameter(2e4 + 2e4 * rank)]
    average(large)
    some = [parameter(2.0 if rank else None), parameter(None), parameter(4.0, torch.float64)]
    transposed = nn.Parameter(torch.zeros(ELEMENTS, 2).t())
    transposed.grad = torch.arange(2.0 * ELEMENTS).reshape(ELEMENTS, 2).t() + rank
    strides = transposed.grad.stride()
    average([*some, transposed], bucket_bytes=2 * ELEMENTS * 2)
    sparse = parameter(1.0)
    sparse.grad = torch.ones(2, ELEMENTS, dtype=torch.float16).to_sparse()
    with pytest.raises(slapo.BuildError, match="sparse"):
        average([sparse])
    means = [None if one.grad is None else one.grad.flatten()[0].item() for one in (*large, *some)]
    return {"means": means, "transposed": transposed.grad, "strides": transposed.grad.stride() == strides}


@pytest.mark.ranks
def test_the_mean_is_of_all_replicas_and_does_not_overflow() -> None:
    for found in run_ranks(on_two, world_size=2):
        assert found["means"] == [4e4, 3e4, 1.0, None, 4.0]  # 4e4 twice is more than float16 holds
        torch.testing.assert_close(found["transposed"], torch.arange(10.0).reshape(ELEMENTS, 2).t() + 0.5)
        assert found["strides"]


def on_four() -> list[str]:
    """What this rank does, in its order."""
    torch.set_num_threads(1)
    sch = staged.scheduled({"dp": 2, "pp": 2}, cuts=4)
    engine: Any = slapo.build(sch, optimizer=staged.grouped, microbatches=2)
    seen: list[str] = []
    original = GradientAverage.begin

    def begin(self: GradientAverage, parameters: list[torch.Tensor]) -> None:
        seen.append(f"{len(parameters)} gradients")
        original(self, parameters)

    GradientAverage.begin = begin  # type: ignore[method-assign, assignment]
    stand = engine._stand
    engine._stand = lambda what: (seen.append(what), stand(what))
    engine.train_step(staged.batch(0))
    return seen


@pytest.mark.ranks
def test_a_stage_sends_its_gradients_while_others_run() -> None:
    for rank, seen in enumerate(run_ranks(on_four, world_size=4)):
        later, earlier = (2, 0) if rank % 2 == 0 else (3, 1)  # the stages of a pipeline rank
        sent = [number for number, what in enumerate(seen) if what.endswith("gradients")]
        last = {
            stage: max(number for number, what in enumerate(seen) if what.startswith(f"stage {stage} in the backward"))
            for stage in (later, earlier)
        }
        exchange = seen.index("exchanging the loss")
        assert last[later] < sent[0] < last[earlier] < sent[1] < exchange < sent[2], (rank, seen)


def test_tensors_are_measured_once_for_their_buckets() -> None:
    class Measured:
        dtype, device, measured = torch.float32, torch.device("cpu"), 0

        @property
        def nbytes(self) -> int:
            Measured.measured += 1
            return 10

    tensors: list[Any] = [Measured() for _ in range(20)]
    assert [len(bucket) for bucket in buckets(tensors, 70)] == [7, 7, 6]
    assert Measured.measured < 3 * len(tensors)
