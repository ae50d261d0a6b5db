"""A fused region at the end of a checkpointed module: recomputing stops inside of it, and that is no failure."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import slapo_core as slapo


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.dense(x) + x)


@pytest.mark.parametrize("compiler", ["aot_eager", "eager"])
def test_a_checkpoint_around_a_fused_region_is_verified(compiler: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8)
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(8, 8), Layer(), nn.Linear(8, 8)), example_inputs=x)
    sch["1"].trace(flatten=True)
    sch["1"].fuse("fusion.bias_dropout_add_norm", compiler=compiler)
    sch["1"].checkpoint()
    assert slapo.verify(sch, x).steps_verified == 3
