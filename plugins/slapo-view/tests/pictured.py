"""A model whose names, source and notes are hostile to a page; and a small transformer-like one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import slapo_core as slapo

EVIL = "</script ><img src=x onerror=alert(1)>&\u2028'\""


class Feed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.feed = nn.LayerNorm(width), Feed(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.feed(self.norm(x))


class Blocks(nn.Module):
    """Blocks between an embedding and a head that is tied to it; a further module under two names."""

    def __init__(self, blocks: int = 6, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.last = self.blocks[blocks - 1]
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def batch() -> dict[str, torch.Tensor]:
    return {"ids": torch.arange(24).reshape(4, 6)}


def split(schedule: slapo.Schedule) -> None:
    feeds: Any = schedule["blocks.*.feed"]
    feeds["up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    feeds["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def scheduled(
    mesh: dict[str, int] | None = None, *, checkpoints: int = 0, stages: int = 1, blocks: int = 6
) -> slapo.Schedule:
    """Blocks in shards over tp, the first ones checkpointed, cut into stages of equal numbers of blocks."""
    schedule = slapo.create_schedule(Blocks(blocks), mesh=mesh, example_inputs=batch())
    if mesh is not None and "tp" in mesh:
        split(schedule)
    for number in range(checkpoints):
        schedule[f"blocks.{number}"].checkpoint()
    for stage in range(1, stages):
        schedule[f"blocks.{blocks * stage // stages - 1}"].pipeline_split()
    return schedule


def rows(tree: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of a picture's tree by path."""
    found = {tree.get("path", ""): tree}
    for child in tree.get("children", ()):
        found |= rows(child)
    return found
