"""Several tensors from outside of the traced module: each call gets each of them in its own place."""

from __future__ import annotations

import torch
from torch import nn

import slapo_core as slapo

COS, SIN, SHIFT = (torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))


class Rotated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * COS - x.flip(-1) * SIN + SHIFT


def test_captured_tensors_are_not_mixed_up() -> None:
    x = torch.randn(2, 6, 8)
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(8, 8), Rotated()), example_inputs=x)
    with sch.reference() as model:
        expected = model(x)
    sch["1"].trace()
    assert str(sch["1"].graph).count("captured_") >= 3
    assert torch.equal(sch.model(x), expected)
