"""pipeline_split keeps the promises that every primitive must keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slapo_pipeline.split import PipelineSplit
from slapo_testing import Case, parametrize_checks


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.unused = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        return x


def batch() -> tuple[torch.Tensor]:
    return (torch.randn(5, 6),)


@pytest.mark.ranks
@parametrize_checks(
    [
        Case(
            PipelineSplit(),
            path="blocks.1",
            model=Blocks,
            inputs=batch,
            rejects=[("", PipelineSplit()), ("blocks", PipelineSplit()), ("blocks.1", PipelineSplit(balance="flops"))],
        ),
        Case(
            PipelineSplit(stages=2),
            path="blocks",
            model=Blocks,
            inputs=batch,
            rejects=[("blocks", PipelineSplit(stages=9)), ("blocks", PipelineSplit(stages=0))],
            name="balanced",
        ),
    ]
)
def test_pipeline_split(check: Any) -> None:
    check()
