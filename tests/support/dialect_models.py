"""Models of several dialects' tests."""

from __future__ import annotations

import torch
from torch import nn


class Masked(nn.Module):
    """Two layers, and a mask that both of them read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x > 0
        return self.second(self.first(x) * mask) * mask


class Normed(nn.Module):
    """Running statistics, and a buffer that every call counts."""

    def __init__(self) -> None:
        super().__init__()
        self.product, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("odd", torch.zeros(3, dtype=torch.uint8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.odd += 1
        return self.norm(self.product(x)).square().mean()
