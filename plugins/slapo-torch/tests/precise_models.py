"""A small model of every kind of tensor, and its engines in a precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import slapo_core as slapo

ISLANDS = ("*norm*", "head")
BF16, FP32 = torch.bfloat16, torch.float32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """With a buffer like a rotary table, and a floating-point input."""

    def __init__(self, blocks: int = 2, *, is_tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)
        self.register_buffer("table", torch.linspace(0.0, 1.0, 8))
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, shift: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(ids)
        x = x + self.table.to(x.dtype) + shift
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return {"loss": F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()), "logits": logits}


def make_model(*args: Any, **kwargs: Any) -> Model:
    torch.manual_seed(0)
    return Model(*args, **kwargs)


def make_batches(count: int = 3) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(11, (count, 4, 5), generator=draw)
    shift = torch.randn(count, 4, 1, 8, generator=draw) / 8
    return [{"ids": one, "shift": also, "labels": one.flip(1)} for one, also in zip(ids, shift, strict=True)]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def build(model: nn.Module | None = None, **options: Any) -> Any:
    options = {"optimizer": adamw, "max_grad_norm": 1.0, **options}
    return slapo.build(slapo.create_schedule(make_model() if model is None else model), **options)


def seen(engine: Any) -> dict[str, set[str]]:
    return {row.what: set(row.dtypes) for row in engine.precision.seen}


def all_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def step_lr(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
