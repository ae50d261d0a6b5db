"""A small model in every form, and its training, for the tests of states and checkpoints."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import nn

import slapo_core as slapo

__all__ = ["FORMS", "Small", "batch", "build", "grouped_adamw", "plain", "train", "world_size"]

_DISTRIBUTED = {
    "optimizer_config": {"use_distributed_optimizer": True, "clip_grad": 0.0},
    "ddp_config": {"use_distributed_optimizer": True},
}
FORMS: dict[str, tuple[str, dict[str, int] | None, dict[str, Any]]] = {
    "torch": ("torch", None, {}),
    "torch tp2": ("torch", {"tp": 2}, {}),
    "torch pp2 tp2": ("torch", {"pp": 2, "tp": 2}, {"microbatches": 2}),
    "megatron": ("megatron", None, {}),
    "megatron tp2": ("megatron", {"tp": 2}, {}),
    "megatron dp2": ("megatron", {"dp": 2}, {}),
    "megatron dp2 distributed": ("megatron", {"dp": 2}, _DISTRIBUTED),
    "megatron tp2 dp2 distributed": ("megatron", {"dp": 2, "tp": 2}, _DISTRIBUTED),
    "megatron pp2 dp2 distributed": ("megatron", {"pp": 2, "dp": 2}, {**_DISTRIBUTED, "microbatches": 2}),
    "megatron pp2 tp2": ("megatron", {"pp": 2, "tp": 2}, {"microbatches": 2}),
    "ZeRO-0 dp2": ("deepspeed", {"dp": 2}, {"config": {"zero_optimization": {"stage": 0}}}),
    "ZeRO-1 dp2": ("deepspeed", {"dp": 2}, {"config": {"zero_optimization": {"stage": 1}}}),
    "ZeRO-2 dp2": ("deepspeed", {"dp": 2}, {"config": {"zero_optimization": {"stage": 2}}}),
    "ZeRO-3 dp2": ("deepspeed", {"dp": 2}, {"config": {"zero_optimization": {"stage": 3}}}),
    "ZeRO-1 tp2": ("deepspeed", {"tp": 2}, {"config": {"zero_optimization": {"stage": 1}}}),
    "ZeRO-1 pp2 tp2": ("deepspeed", {"pp": 2, "tp": 2}, {"config": {"zero_optimization": {"stage": 1}}}),
}
"""Target, mesh, and options."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(10), nn.Linear(10, 14), nn.Linear(14, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Small(nn.Module):
    """``loss(tokens, labels)``: four blocks between tied embeddings; one parameter is frozen, sizes are odd.

    Args:
        block: the class of a block.
        scale: the values of the frozen parameter; None: constant ones.
    """

    def __init__(self, block: type[nn.Module] = Block, scale: torch.Tensor | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 10)
        self.scale = nn.Parameter(torch.full((3,), 0.5) if scale is None else scale, requires_grad=False)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(10, 17, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(tokens) * self.scale.sum()
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def make(*, seed: int = 0, dtype: torch.dtype = torch.float32) -> Small:
    torch.manual_seed(seed)
    return Small().to(dtype)


def batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, 17, (8, 6), generator=generator)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def grouped_adamw(parameters: Any) -> torch.optim.Optimizer:
    """Two groups with other settings, and one that is empty on every rank."""
    parameters = list(parameters)
    matrices = [one for one in parameters if one.dim() > 1]
    vectors = [one for one in parameters if one.dim() == 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": 0.1, "betas": (0.8, 0.95)},
            {"params": [], "weight_decay": 0.5},
            {"params": vectors, "weight_decay": 0.0, "lr": 2e-2},
        ],
        lr=1e-2,
        eps=1e-4,
    )


def build(form: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, padded: bool = True, **options: Any) -> Any:
    """An engine; another seed gives other first values. Options that are mappings are merged into those of the form.

    The vocabulary is split with padding where ``padded``, else it is whole.
    """
    target, mesh, own = FORMS[form]
    if target == "megatron":
        from tests.support.cpu_megatron import install

        install()
    sch = slapo.create_schedule(make(seed=seed, dtype=dtype), mesh=mesh, example_inputs=batch(0))
    if mesh is not None and "tp" in mesh:
        for number in range(4):
            sch[f"blocks.{number}.up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
            sch[f"blocks.{number}.down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        if padded:
            sch["embedding"].shard("weight", axis=0, pad=True).sync("fwd_post", "all_reduce")  # tied to the head
            sch["head"].sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather")
    if mesh is not None and "pp" in mesh:
        sch["blocks.1"].pipeline_split()
    merged: dict[str, Any] = {"optimizer": grouped_adamw}
    for given in ({"config": {"gradient_clipping": 0.0}} if target == "deepspeed" else {}, own, options):
        for name, value in given.items():
            merged[name] = {**(merged.get(name) or {}), **value} if isinstance(value, dict) else value
    return slapo.build(sch, target=target, **merged)


def world_size(form: str) -> int:
    """How many processes a form takes."""
    return math.prod((FORMS[form][1] or {}).values())


def train(engine: Any, first: int, last: int) -> list[float]:
    """Steps ``first`` to ``last - 1``, each replica on its share of the batch."""
    mesh = engine._state.mesh
    replicas, place = (mesh.size("dp"), mesh.rank("dp")) if mesh is not None else (1, 0)
    losses = []
    for step in range(first, last):
        share = {name: value.chunk(replicas)[place] for name, value in batch(step).items()}
        losses.append(float(engine.train_step(share).loss))
    return losses


@functools.cache
def plain(steps: int) -> dict[str, torch.Tensor]:
    """The state dict after so many steps without slapo."""
    model = make()
    optimizer = grouped_adamw(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        model(**batch(step))["loss"].backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
