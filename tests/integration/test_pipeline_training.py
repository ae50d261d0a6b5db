"""A cut model trains on real ranks as the reference model does in one process; `tools/pipeline_matrix.py` runs more."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import slapo_core as slapo
from slapo_testing import run_ranks
from tests.integration.cells import run_cells
from tests.integration.pipelines.against import Case, differences, sgd
from tests.integration.pipelines.matrix import PipelineCell
from tests.support.hand_stages import Net, batch


def batch_of(step: int, replica: int, *, samples: int, bias: bool = True) -> dict[str, Any]:
    given = batch(samples, seed=10 * step + replica)
    if not bias:
        del given["bias"]
    return given


def cuts(stages: int) -> list[str]:
    each = 8 // stages
    return [f"blocks.{number}" for number in range(each - 1, 7, each)]


def tensor_parallel(sch: slapo.Schedule) -> None:
    for number in (0, 1, 2, 3, 5, 7):
        block = sch[f"blocks.{number}"]
        block["first"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        block["second"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def summed_loss(output: Any, piece: Any) -> torch.Tensor:
    return output["logits"].logsumexp(-1).mean() + output["early"].square().mean()


def case(mesh: dict[str, int], schedule: str | None, stages: int, count: int, **more: Any) -> Case:
    bias = more.pop("bias", True)
    make = functools.partial(batch_of, samples=2 * count, bias=bias)
    options = {"max_grad_norm": 1.0, **({"batch_axes": {"bias": None}} if bias else {}), **more.pop("options", {})}
    return Case(Net, make, cuts(stages), mesh, schedule, count, options=options, **more)


def on_two() -> list[Case]:
    mesh = {"pp": 2}
    return [
        case(mesh, None, 2, 4),
        case(mesh, "gpipe", 2, 3, optimizer=sgd, options={"loss": summed_loss}),
        case(mesh, None, 4, 3),
        case(mesh, "interleaved_zero_bubble", 4, 8, optimizer=sgd),
        case(mesh, "dualpipe_v", 4, 7, bias=False),
    ]


def on_four() -> list[Case]:
    return [
        case({"pp": 4}, "1f1b", 4, 5),
        case({"dp": 2, "pp": 2}, "zbv_zero_bubble", 4, 4, bias=False),
        case({"pp": 2, "tp": 2}, "interleaved_zero_bubble", 4, 3, steps=tensor_parallel, optimizer=sgd),
    ]


def on_rank(world_size: int) -> list[str]:
    torch.set_num_threads(1)
    found = []
    for one in on_two() if world_size == 2 else on_four():
        found += differences(one)
    return found


def test_stages_on_two_ranks_train_what_one_process_trains() -> None:
    for found in run_ranks(on_rank, 2, world_size=2):
        assert found == []


def of_families() -> list[str]:
    torch.set_num_threads(1)
    chosen = [
        PipelineCell("gpt2", "pp 2", "1f1b", 2, 3),
        PipelineCell("t5", "pp 2", "zbv_zero_bubble", 4, 2, full=True),
        PipelineCell("vit", "pp 2", "looped_bfs", 4, 1),
        PipelineCell("resnet", "pp 2", "dualpipe_v", 4, 5, optimizer="sgd"),
    ]
    return [text for differing, _ in run_cells(chosen) for text in differing]


@pytest.mark.breadth
def test_models_of_every_kind_train_in_stages() -> None:
    for found in run_ranks(of_families, world_size=2):
        assert found == []


@pytest.mark.breadth
def test_stages_go_together_with_replicas_and_tensor_parallelism() -> None:
    for found in run_ranks(on_rank, 4, world_size=4):
        assert found == []
