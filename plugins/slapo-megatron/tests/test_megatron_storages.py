"""Parameters over one memory: refused where the distributed optimizer would part them, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_testing import run_ranks
from tests.messages import Messages

pytestmark = pytest.mark.ranks


class Two(nn.Module):
    def __init__(self, second: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = second(self.a.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)).square().mean()


MODELS = {
    "another object": lambda weight: nn.Parameter(weight.data),
    "a part": lambda weight: nn.Parameter(weight.data[2:]),
    "a tie": lambda weight: weight,
    "a copy": lambda weight: nn.Parameter(weight.data.clone()),
}


def on_rank(_: None = None) -> dict[Any, str]:
    from tests.support.cpu_megatron import install

    install()
    said = {}
    for name, second in MODELS.items():
        for distributed in (True, False):
            if name == "a part" and not distributed:
                continue
            given = {"use_distributed_optimizer": distributed}
            x = torch.ones(2, 8)
            try:
                model = Two(second)
                if name == "a part":
                    model.b = nn.Linear(8, 6)
                    model.b.weight = second(model.a.weight)
                sch = slapo.create_schedule(model, example_inputs=x)
                config = {"lr": 0.1, **given}
                engine = slapo.build(sch, target="megatron", optimizer_config=config, ddp_config=given)
                engine.train_step(x)
                engine.close()
                said[name, distributed] = ""
            except slapo.BuildError as error:
                said[name, distributed] = str(error)
    return said


def test_parameters_over_one_memory_are_refused_where_they_would_be_parted(message: Messages) -> None:
    (said,) = run_ranks(on_rank, world_size=1)
    for name in ("another object", "a part"):
        message(said.pop((name, True)), "'a.weight' and 'b.weight'", "one memory", "one parameter")
    assert set(said.values()) == {""}, said
