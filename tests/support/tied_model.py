"""A small model that is split, tied and normalized, and its training without a schedule: for tests of dialects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import slapo_core as slapo

__all__ = ["CLIP", "GROUPS", "Tied", "adamw", "batch", "built", "make", "share", "split", "trained"]

WORDS, WIDTH, LENGTH = 12, 8, 5
CLIP = 0.05  # below the norm of every step
GROUPS: dict[str, Any] = {
    "no_decay": ("*.bias", "*norm*"),
    "param_groups": {"blocks.1.*": {"lr": 5e-3}, "head.*": {"lr": 2e-3, "weight_decay": 0.3}},
    "max_grad_norm": CLIP,
}
"""Arguments of ``build``: patterns of parameter groups, and clipping."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.q(x) * self.k(x)
        return self.norm(x + self.down(F.gelu(self.up(x))))


class Tied(nn.Module):
    """Words in, the loss of the next ones out; the embedding is tied to the head, two scales are the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.strength = nn.Parameter(torch.tensor(1.1))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) * self.scale * self.strength
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def make() -> Tied:
    torch.manual_seed(3)
    return Tied()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


def batch(step: int, samples: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids, labels = (torch.randint(0, WORDS, (samples, LENGTH), generator=generator) for _ in range(2))
    return {"ids": ids, "labels": labels}


def share(whole: Mapping[str, torch.Tensor], mesh: slapo.Mesh | None) -> dict[str, torch.Tensor]:
    """What this rank's replica is given of a batch."""
    replicas, own = (mesh.size("dp"), mesh.rank("dp")) if mesh is not None else (1, 0)
    return {name: tensor.chunk(replicas)[own] for name, tensor in whole.items()}


def split(sch: slapo.Schedule) -> None:
    """The feed-forward part over ``tp``."""
    for block in sch["blocks.*"]:
        block["up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        block["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def built(
    mesh: Mapping[str, int] | None,
    *,
    target: str = "torch",
    steps: Callable[[slapo.Schedule], None] | None = None,
    model: nn.Module | None = None,
    **options: Any,
) -> tuple[slapo.Schedule, Any]:
    """A schedule of the model, split where the mesh says so, and its engine, with AdamW unless options say else."""
    sch = slapo.create_schedule(make() if model is None else model, mesh=mesh, example_inputs=batch(0))
    if mesh is not None and mesh.get("tp", 1) > 1:
        split(sch)
    if steps is not None:
        steps(sch)
    return sch, slapo.build(sch, target=target, **{"optimizer": adamw, **options})


def trained(steps: int = 3, clip: float = CLIP) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses and norms of the reference model's steps, and its weights after them."""
    model = make()
    optimizer, losses, norms = adamw(model.parameters()), [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**batch(step))
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms, model.state_dict()
