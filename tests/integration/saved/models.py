"""Small models of which schedules were saved in format 1: see tests/integration/test_saved_schedules.py."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, size: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))
        self.dense = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            each(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        return self.dense((F.softmax(scores, dim=-1) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.attention, self.norm = Attention(size), nn.LayerNorm(size)
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch() -> torch.Tensor:
    return torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
