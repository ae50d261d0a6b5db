"""The sum of a partial output takes that output's memory, but only where nobody else can see it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo_core as slapo
from slapo_core.testing import run_ranks
from slapo_tp import collectives

from .checks import rand, same_as_untouched


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))


def split(sch: Any) -> None:
    sch["0"].shard(["weight", "bias"], axis=0).sync("backward")
    sch["2"].shard("weight", axis=1).sync("forward")


def check_overwriting() -> None:
    overwritten: list[Tensor] = []
    original = collectives._AllReduceInPlace.forward

    def spy(ctx: Any, tensor: Tensor, name: str) -> Tensor:
        overwritten.append(tensor)
        return original(ctx, tensor, name)

    collectives._AllReduceInPlace.forward = staticmethod(spy)
    try:
        same_as_untouched(mlp, split, (rand(5, 6),))
        assert len(overwritten) == 3  # once a step: the usual case saves the copy

        # A hook of the user's that was there before keeps what the layer gave: this rank's part, not the sum.
        overwritten.clear()
        kept: list[Tensor] = []
        torch.manual_seed(0)
        model = mlp().double()
        model[2].register_forward_hook(lambda module, args, output: kept.append(output))
        sch = slapo.create_schedule(model, mesh={"tp": 2})
        split(sch)
        summed = model(rand(5, 6))
        assert overwritten == []
        assert not torch.allclose(kept[0] + model[2].bias, summed)

        # A module of no known kind may hold on to its output.
        class Keeps(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                self.last = super().forward(x)
                return self.last

        other = nn.Sequential(nn.Linear(6, 8), Keeps(8, 6, bias=False)).double()
        sch = slapo.create_schedule(other, mesh={"tp": 2})
        sch["0"].shard(["weight", "bias"], axis=0).sync("backward")
        sch["1"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        summed = other(rand(5, 6))
        assert overwritten == []
        assert not torch.allclose(other[1].last, summed)
    finally:
        collectives._AllReduceInPlace.forward = staticmethod(original)


@pytest.mark.ranks
def test_only_an_output_that_nobody_else_holds_is_overwritten() -> None:
    run_ranks(check_overwriting, world_size=2)
