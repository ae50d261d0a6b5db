"""A small model under every layout, and its training without interruption, for the matrix of states."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import slapo_core as slapo
from tests.integration.dialects.small import Small

__all__ = ["LAYOUTS", "MAX_GRAD_NORM", "Trained", "batch", "build", "replica_of", "train_plain", "world_size"]

FSDP: dict[str, Any] = {"data_parallel": "fsdp"}
STAGES: dict[str, Any] = {"microbatches": 2}
_ZERO = {"use_distributed_optimizer": True}
DISTRIBUTED: dict[str, Any] = {"optimizer_config": _ZERO, "ddp_config": _ZERO}

LAYOUTS: dict[str, tuple[str, dict[str, int] | None, dict[str, Any]]] = {
    "plain": ("torch", None, {}),
    "tp2": ("torch", {"tp": 2}, {}),
    "tp2, sequences": ("torch", {"tp": 2}, {}),
    "fsdp2": ("torch", {"dp": 2}, FSDP),
    "ZeRO-1, dp2": ("deepspeed", {"dp": 2}, {"config": {"zero_optimization": {"stage": 1}}}),
    "ZeRO-3, dp2": ("deepspeed", {"dp": 2}, {"config": {"zero_optimization": {"stage": 3}}}),
    "tp4": ("torch", {"tp": 4}, {}),
    "fsdp4": ("torch", {"dp": 4}, FSDP),
    "hsdp2x2": ("torch", {"dp_replicate": 2, "dp": 2}, FSDP),
    "dp2 x tp2": ("torch", {"dp": 2, "tp": 2}, {}),
    "fsdp2 x tp2": ("torch", {"dp": 2, "tp": 2}, FSDP),
    "pp2 x tp2": ("torch", {"pp": 2, "tp": 2}, STAGES),
    "pp2 x fsdp2": ("torch", {"pp": 2, "dp": 2}, {**FSDP, **STAGES}),
    "Megatron, dp2 x tp2": ("megatron", {"dp": 2, "tp": 2}, DISTRIBUTED),
    "Megatron, pp2 x dp2": ("megatron", {"pp": 2, "dp": 2}, {**DISTRIBUTED, **STAGES}),
}
"""Target, mesh, and options of ``build``; those of fewer ranks come first."""

WIDTH, WORDS, BATCH, LENGTH = 10, 17, 8, 6
MAX_GRAD_NORM = 0.25
"""Below the norm of every step: :func:`train_plain` makes sure of it."""


class Block(nn.Module):
    """A gated MLP, whose first weight holds two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * 12)
        self.down = nn.Linear(12, WIDTH, bias=False)
        self.register_buffer("offset", torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(self.norm(x) + self.offset).chunk(2, dim=-1)
        return x + self.down(nn.functional.silu(gate) * up)


def make(dtype: torch.dtype, *, seed: int = 0) -> Small:
    """Make the model of four gated blocks, with a frozen parameter that each seed fills otherwise."""
    torch.manual_seed(seed)
    return Small(Block, torch.rand(3)).to(dtype)


def batch(step: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=draw)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Two groups with other settings."""
    parameters = list(parameters)
    matrices = {"params": [one for one in parameters if one.dim() > 1], "weight_decay": 0.1, "betas": (0.8, 0.95)}
    vectors = {"params": [one for one in parameters if one.dim() == 1], "weight_decay": 0.0, "lr": 2e-2}
    return torch.optim.AdamW([matrices, vectors], lr=1e-2, eps=1e-4)


def scheduler(optimizer: torch.optim.Optimizer) -> Any:
    """Halve the learning rate after each third step, which is one after the resumption."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)


def build(layout: str, dtype: torch.dtype, *, seed: int = 0) -> Any:
    """An engine; another seed gives other first values."""
    target, mesh, options = LAYOUTS[layout]
    if target == "megatron":
        from tests.support.cpu_megatron import install

        install()
    sch = slapo.create_schedule(make(dtype, seed=seed), mesh=mesh, example_inputs=batch(0))
    if mesh is not None and "tp" in mesh:
        _split(sch, sequences=layout.endswith("sequences"))
    if mesh is not None and "pp" in mesh:
        sch["blocks.1"].pipeline_split()
    return slapo.build(
        sch, target=target, optimizer=adamw, lr_scheduler=scheduler, max_grad_norm=MAX_GRAD_NORM, **options
    )


def _split(sch: slapo.Schedule, *, sequences: bool) -> None:
    """Over ``tp``; with shards of the sequence between pairs of matrices where asked for."""
    sch["embedding"].shard("weight", axis=0, pad=True)
    for block in sch["blocks.*"]:
        block["up"].shard(["weight", "bias"], axis=0, packed=2)
        block["down"].shard("weight", axis=1)
        if sequences:
            block["up"].sync("fwd_pre", "all_gather", axis=1)
            block["down"].sync("fwd_post", "reduce_scatter", axis=1)
            block["norm"].sync_gradient(["weight", "bias"])
        else:
            block["up"].sync("bwd_post", "all_reduce")
            block["down"].sync("fwd_post", "all_reduce")
    if sequences:
        sch["blocks.0"].sync("fwd_pre", "reduce_scatter", axis=1)
        sch["head"].sync("fwd_pre", "all_gather", axis=1)
    else:
        sch["embedding"].sync("fwd_post", "all_reduce")
        sch["head"].sync("bwd_post", "all_reduce")
    sch["head"].sync("fwd_post", "all_gather")


def replica_of(engine: Any) -> tuple[int, int]:
    """The place of this rank's samples in a batch, and the number of such places."""
    mesh = engine._state.mesh
    if mesh is None:
        return 0, 1
    replicas = mesh.size("dp_replicate") * mesh.size("dp")
    return mesh.rank("dp_replicate") * mesh.size("dp") + mesh.rank("dp"), replicas


def world_size(layout: str) -> int:
    """How many processes a layout takes."""
    return math.prod((LAYOUTS[layout][1] or {}).values())


@dataclass(frozen=True)
class Trained:
    """What a step of the uninterrupted training gave.

    Args:
        losses: of each sample.
        norm: of all gradients, before clipping.
        state: the state dict after it.
        moments: the optimizer's state, as ``"up.weight::exp_avg"``.
        rates: the learning rates after it.
    """

    losses: torch.Tensor
    norm: float
    state: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]
    rates: list[float]


@functools.cache
def train_plain(steps: int, dtype: torch.dtype) -> tuple[Trained, ...]:
    """Train the model as its author would."""
    model = make(dtype)
    optimizer = adamw([one for one in model.parameters() if one.requires_grad])
    rates, found = scheduler(optimizer), []
    for step in range(steps):
        optimizer.zero_grad()
        given = batch(step)
        output = model(**given)
        output["loss"].backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM))
        assert norm > 1.2 * MAX_GRAD_NORM, norm
        optimizer.step()
        rates.step()
        logits = output["logits"].detach().transpose(1, 2)
        losses = nn.functional.cross_entropy(logits, given["labels"], reduction="none").mean(1)
        names = {one: name for name, one in model.named_parameters()}
        moments = {
            f"{names[one]}::{key}": value.clone()
            for one, state in optimizer.state.items()
            for key, value in state.items()
        }
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        found.append(Trained(losses, norm, state, moments, rates.get_last_lr()))
    return tuple(found)
