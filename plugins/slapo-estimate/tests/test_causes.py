"""Whose step a collective is of: hooks, functions of the user's, wrappers, modules put in; and what the model does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.utils.checkpoint import checkpoint

import slapo_core as slapo
from slapo_estimate.results import CollectiveCall


def summed(x: torch.Tensor) -> torch.Tensor:
    return functional.all_reduce(x, "sum", dist.group.WORLD) + 0


class Talks(nn.Linear):
    """A layer that communicates itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return summed(super().forward(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.plain = Talks(8, 8), nn.Linear(8, 8)
        self.block, self.again = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.plain(self.own(x))
        x = self.block(x)
        return checkpoint(self.again, x, use_reentrant=True).sum()  # type: ignore[no-any-return]


def by_hand(module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
    return summed(output)


def of_gradients(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
    return tuple(summed(each) for each in grad_input)


def schedule(sch: slapo.Schedule) -> None:
    for path in ("block", "again"):
        sch[f"{path}.up"].shard(["weight", "bias"], axis=0).sync("bwd_post", of_gradients)
        sch[f"{path}.down"].shard("weight", axis=1).sync("fwd_post", by_hand)
    sch["block"].checkpoint()
    sch["plain"].replace(Talks(8, 8))


def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output


@pytest.fixture(scope="module")
def collectives() -> tuple[CollectiveCall, ...]:
    batch = torch.empty(4, 8, device="meta")
    return slapo.estimate_functions(Model, schedule, batch, mesh={"tp": 2}, loss=loss).kinds[0].collectives


@pytest.mark.ranks
def test_collectives_name_the_step_that_added_them(collectives: tuple[CollectiveCall, ...]) -> None:
    found = [(each.phase, each.module, each.record.partition(" ")[0]) for each in collectives]
    assert found == [
        ("forward", "own", ""),
        ("forward", "plain", "#10"),
        ("forward", "block.down", "#4"),
        ("forward", "again.down", "#8"),
        ("backward", "again.down", "#8"),  # reentrant: all is computed again
        ("backward", "again.down", "#8"),  # and the gradient of the sum is a sum
        ("backward", "again.up", "#6"),
        ("backward", "block.down", "#4"),
        ("backward", "block.up", "#2"),
        ("backward", "plain", "#10"),
        ("backward", "own", ""),
    ]
