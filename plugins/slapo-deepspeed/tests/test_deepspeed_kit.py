"""The dialect keeps what every dialect promises: with partitioned optimizers, partitioned weights, and pipelines."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slapo_deepspeed.cases import adamw, sgd, slapo_cases
from slapo_testing import DialectCase, parametrize_dialect_checks, preload_modules
from slapo_testing.dialects.case import regression_steps

pytestmark = pytest.mark.ranks
preload_modules("deepspeed", "slapo_deepspeed.cases", "slapo_tp", "slapo_pipeline")

ON_RANKS = {
    "split_model_trains_as_one_process",
    "diverged_replicas_are_found",
    "another_batch_on_a_rank_is_refused",
    "failure_on_one_rank_ends_the_build_on_all",
    "other_options_on_a_rank_are_refused",
}


@parametrize_dialect_checks([case for case in slapo_cases() if case.name == "zero-3"])
def test_with_partitioned_weights(check: Any) -> None:
    check()


@pytest.mark.breadth
@parametrize_dialect_checks([case for case in slapo_cases() if case.name == "zero-1"], checks=ON_RANKS)
def test_with_a_partitioned_optimizer(check: Any) -> None:
    check()


def cut(sch: Any) -> None:
    regression_steps(sch)
    if sch.mesh is not None and sch.mesh.size("pp") > 1:
        sch["down"].pipeline_split()


PIPELINE = DialectCase(
    "deepspeed",
    config={"config": {"zero_optimization": {"stage": 1}, "wall_clock_breakdown": False}},
    schedule=cut,
    optimizers=(sgd, adamw),
    meshes=[{"pp": 2, "tp": 2}],
    dtype=torch.float32,
    needs_process_group=True,
    name="pipeline",
)


@pytest.mark.breadth
@parametrize_dialect_checks([PIPELINE], checks=ON_RANKS)
def test_with_a_pipeline_of_split_stages(check: Any) -> None:
    check()
