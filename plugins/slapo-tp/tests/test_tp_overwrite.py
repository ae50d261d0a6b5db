"""The sum of a partial output takes that output's memory, but only where nobody else can see it."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo_core as slapo
from slapo_testing import run_ranks
from slapo_tp import collectives

from .checks import rand, same_as_untouched


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))


def split(sch: Any) -> None:
    sch["0"].shard(["weight", "bias"], axis=0).sync("backward")
    sch["2"].shard("weight", axis=1).sync("forward")


def keep_by_global_hook(layer: nn.Module, kept: list[Tensor]) -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if module is layer:
            kept.append(output)

    return torch.nn.modules.module.register_module_forward_hook(hook).remove


def keep_by_forward(layer: nn.Module, kept: list[Tensor]) -> Any:
    present = layer.forward

    def forward(x: Tensor) -> Tensor:
        kept.append(present(x))
        return kept[-1]

    layer.forward = forward  # type: ignore[method-assign]
    return lambda: None


def keep_by_wrapped_forward(layer: nn.Module, kept: list[Tensor]) -> Any:
    present = layer.forward.__func__

    @functools.wraps(present)
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        kept.append(present(self, x))
        return kept[-1]

    layer.forward = types.MethodType(forward, layer)  # type: ignore[method-assign]
    return lambda: None


keep_by_forward_set_before = functools.partial(keep_by_forward)


def check_overwriting() -> None:
    overwritten: list[Tensor] = []
    original = collectives._TABLE["all_reduce_"]

    def spy(tensor: Tensor, *arguments: Any) -> Tensor:
        overwritten.append(tensor)
        return original.run(tensor, *arguments)

    collectives._TABLE["all_reduce_"] = original._replace(run=spy)
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

        for keep in (keep_by_global_hook, keep_by_forward, keep_by_wrapped_forward, keep_by_forward_set_before):
            kept.clear()
            model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6, bias=keep is not keep_by_forward_set_before))
            model = model.double()
            if keep is keep_by_forward_set_before:
                undo = keep(model[1], kept)
            sch = slapo.create_schedule(model, mesh={"tp": 2})
            sch["0"].shard(["weight", "bias"], axis=0).sync("backward")
            sch["1"].shard("weight", axis=1).sync("forward")
            if keep is not keep_by_forward_set_before:
                undo = keep(model[1], kept)
            try:
                summed = model(rand(5, 6))
            finally:
                undo()
            assert overwritten == [], keep
            bias = 0 if model[1].bias is None else model[1].bias
            assert not torch.allclose(kept[0] + bias, summed), keep

        # What a step wraps around the forward is not looked into.
        sch = slapo.create_schedule(mlp().double(), mesh={"tp": 2})
        split(sch)
        sch["2"].checkpoint()
        sch.model(rand(5, 6))
        assert overwritten == []

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
        collectives._TABLE["all_reduce_"] = original


@pytest.mark.ranks
def test_all_reduce_overwrites_only_an_output_without_other_references() -> None:
    run_ranks(check_overwriting, world_size=2)
