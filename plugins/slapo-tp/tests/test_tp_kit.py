"""shard, sync, shard_attribute, sync_gradient and fork_rng keep the promises that every primitive must keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slapo_testing import Case, parametrize_checks
from slapo_tp.attributes import ShardAttribute
from slapo_tp.fork_rng import ForkRng
from slapo_tp.shard import Shard
from slapo_tp.sync import Sync
from slapo_tp.sync_gradient import SyncGradient

pytestmark = pytest.mark.ranks


class Heads(nn.Module):
    """A module that works with as many heads as its attribute says."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.heads = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).unflatten(-1, (self.heads, -1))
        return self.down(hidden.softmax(-1).flatten(-2))


def batch() -> tuple[torch.Tensor]:
    return (torch.randn(5, 6),)


COMMON: dict[str, Any] = {"model": Heads, "inputs": batch, "mesh": ("dp", "tp")}
UP = Shard(("weight", "bias"), axis=0)
DOWN = Shard("weight", axis=1)
BACKWARD = Sync("bwd_post", "all_reduce")
FORWARD = Sync("fwd_post", "all_reduce")
HEADS = ShardAttribute("heads")


@parametrize_checks(
    [
        Case(
            UP,
            path="up",
            after=[("up", BACKWARD), ("", HEADS), ("down", DOWN), ("down", FORWARD)],
            rejects=[Shard("wieght", axis=0), Shard("weight", axis=2), ("up", Shard("weight", axis=0, mesh_dim="pp"))],
            **COMMON,
        ),
        Case(
            DOWN,
            path="down",
            before=[("up", UP), ("up", BACKWARD), ("", HEADS)],
            after=[("down", FORWARD)],
            name="shard-inputs",
            **COMMON,
        ),
    ]
)
def test_shard(check: Any) -> None:
    check()


@parametrize_checks(
    [
        Case(
            FORWARD,
            path="down",
            before=[("up", UP), ("up", BACKWARD), ("", HEADS), ("down", DOWN)],
            rejects=[("up", Sync("fwd_post", "all_reduce"))],
            **COMMON,
        ),
        Case(
            BACKWARD,
            path="up",
            before=[("up", UP), ("", HEADS), ("down", DOWN), ("down", FORWARD)],
            rejects=[("down", Sync("fwd_pre", "all_reduce", inputs=("y",)))],
            name="sync-backward",
            **COMMON,
        ),
        Case(
            Sync("bwd_post", "all_reduce", overlap=True),
            path="up",
            before=[("up", UP), ("", HEADS), ("down", DOWN), ("down", FORWARD)],
            rejects=[("down", Sync("fwd_post", "all_reduce", overlap=True))],
            name="sync-overlap",
            **COMMON,
        ),
    ]
)
def test_sync(check: Any) -> None:
    check()


@parametrize_checks(
    [
        Case(
            HEADS,
            before=[("up", UP), ("up", BACKWARD), ("down", DOWN), ("down", FORWARD)],
            rejects=[ShardAttribute("haeds"), ShardAttribute("training")],
            **COMMON,
        )
    ]
)
def test_shard_attribute(check: Any) -> None:
    check()


class NormedHeads(Heads):
    """The same with a norm of each head, whole on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.up(x).unflatten(-1, (self.heads, -1)))
        return self.down(hidden.flatten(-2))


@parametrize_checks(
    [
        Case(
            SyncGradient(("weight", "bias")),
            path="norm",
            before=[("up", UP), ("up", BACKWARD), ("", HEADS), ("down", DOWN), ("down", FORWARD)],
            rejects=[SyncGradient("wieght"), ("up", SyncGradient("weight"))],
            **{**COMMON, "model": NormedHeads},
        )
    ]
)
def test_sync_gradient(check: Any) -> None:
    check()


@parametrize_checks(
    [
        Case(
            ForkRng(),
            path="up",
            before=[("up", UP), ("up", BACKWARD), ("", HEADS), ("down", DOWN), ("down", FORWARD)],
            rejects=[ForkRng(mesh_dim="pp")],
            **COMMON,
        )
    ]
)
def test_fork_rng(check: Any) -> None:
    check()
