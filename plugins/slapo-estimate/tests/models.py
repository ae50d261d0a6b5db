"""Small models, schedules and settings for estimates; at the top level of a module, as other processes need them."""

from __future__ import annotations

import ctypes
import os
from functools import partial
from typing import Any

import torch
from torch import nn

import slapo_core as slapo

adam = partial(torch.optim.AdamW, lr=1e-3)


class Net(nn.Module):
    """Two layers that can be split, with tied weights and a buffer that the forward decides by."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.into, self.head = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.head.weight = self.into.weight
        self.register_buffer("places", torch.arange(5), persistent=False)

    def forward(self, x: torch.Tensor, *, extra: Any = None) -> torch.Tensor:
        y = self.last(torch.relu(self.first(self.into(x))))
        if self.places.sum() == 10:  # known: else there would be an error
            y = y + 1
        if extra is not None:
            y = y + extra["deep"][0]
        return self.head(y).sum()


class DecidesBy(nn.Module):
    """Decides by what ``read`` finds in what it computes."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Decider(read)])

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.inner[0](x, mask).sum()


class Decider(nn.Module):
    """See :class:`DecidesBy`."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.fc, self.read = nn.Linear(8, 8), read

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        y = self.fc(x)
        if self.read == "item" and y.sum() > 0:
            return y
        if self.read == "pointer":
            ctypes.memset(y.data_ptr(), 0, 0)
        if self.read == "index":
            return y[y > 0]
        if self.read == "shape":
            return y.view(3, -1)
        if self.read == "mask":
            assert mask is not None
            inverse = ~mask
            return y[inverse] * (2 if mask.all() else 1) + inverse.nonzero().shape[0] + inverse.sum().item()
        return y


def make_net() -> nn.Module:
    """On the default device."""
    return Net()


def split(sch: slapo.Schedule) -> None:
    """The two layers over ``tp``."""
    node: Any = sch
    node["first"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    node["last"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def split_without_gpu(sch: slapo.Schedule) -> None:
    """As :func:`split`; raises where a GPU could be seen."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert not torch.cuda.is_available()
    split(sch)


def split_wrongly(sch: slapo.Schedule) -> None:
    """Raises an error of its own."""
    raise ValueError("no such layer")
