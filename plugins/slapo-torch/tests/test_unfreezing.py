"""A parameter that is unfrozen after the build: DistributedDataParallel does not know it, so replicas would part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_testing import run_ranks
from tests.messages import Messages
from tests.support.building import sgd


def model() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    made[0].bias.requires_grad_(False)
    return made


def mean(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output.square().mean()


def unfrozen(mesh: dict[str, int] | None) -> str:
    torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    engine: Any = slapo.build(slapo.create_schedule(model(), mesh=mesh), target="torch", optimizer=sgd, loss=mean)
    engine.train_step(torch.randn(3, 4))
    before = engine.module[0].bias.clone()
    engine.module[0].bias.requires_grad_(True)
    try:
        engine.train_step(torch.randn(3, 4))
    except slapo.BuildError as error:
        return str(error)
    return "trained" if not torch.equal(before, engine.module[0].bias) else "not trained"


@pytest.mark.ranks
def test_a_parameter_that_is_unfrozen_is_refused_on_replicas(message: Messages) -> None:
    [text] = set(run_ranks(unfrozen, {"dp": 2}, world_size=2))
    message(text, "'0.bias' was unfrozen", "engine.load(directory)")


def test_one_process_trains_the_unfrozen_model() -> None:
    assert unfrozen(None) == "trained"
