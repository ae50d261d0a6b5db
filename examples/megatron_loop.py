"""Train a scheduled model in a loop of your own on megatron.core, as a script with ``pretrain`` has it.

    torchrun --nproc-per-node 4 examples/megatron_loop.py

The schedule splits the model, and ``slapo_megatron.model_chunks`` gives it to Megatron: process groups, the distributed
optimizer, its scheduler, the forward-backward function and the loop are the script's. Megatron needs a GPU for each
process.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import nn
from torch.nn import functional as F

import slapo_core as slapo
import slapo_megatron

WORDS, WIDTH, LENGTH = 64, 32, 16
SAMPLES, MICRO_BATCHES, STEPS = 8, 2, 5
TENSOR_PARALLEL = 2
RATE, DECAY, CLIP = 1e-2, 0.1, 0.5


class Model(nn.Module):
    """A small language model without attention; nothing in it knows of Megatron."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def split(sch: slapo.Schedule) -> None:
    """Tensor parallelism of the feed-forward layer, and activation checkpointing of it."""
    sch["up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    sch["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    sch["norm"].checkpoint()


def batch(step: int) -> torch.Tensor:
    """The samples of all replicas, the same in every process; every second step has the same ones."""
    return torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(step % 2))


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def forward_step(micro_batches: Iterator[torch.Tensor], model: nn.Module) -> tuple[torch.Tensor, Any]:
    """As Megatron's schedules call it: the output, and the function that makes the loss of it."""
    tokens = next(micro_batches)
    return model(tokens), functools.partial(loss_func, tokens)


def loss_func(tokens: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = loss_of(logits, tokens)
    return loss, {"loss": loss.detach().clone()}


def train(device: torch.device, steps: int = STEPS) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on all processes.

    Args:
        device: of this process.
        steps: how many.

    Returns:
        the loss of each step, a mean over all samples; and the weights, under the names of the model.
    """
    replicas = dist.get_world_size() // TENSOR_PARALLEL
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=TENSOR_PARALLEL)
    sch = slapo.create_schedule(make_model().to(device), mesh={"dp": replicas, "tp": TENSOR_PARALLEL})
    split(sch)

    optimizer_config = OptimizerConfig(
        lr=RATE, min_lr=0.0, weight_decay=DECAY, adam_eps=1e-4, clip_grad=CLIP, use_distributed_optimizer=True
    )
    chunks = slapo_megatron.model_chunks(
        sch,
        optimizer_config=optimizer_config,
        ddp_config={"use_distributed_optimizer": True, "overlap_grad_reduce": True},
    )
    optimizer = get_megatron_optimizer(optimizer_config, chunks)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=RATE,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=100,
        lr_decay_style="linear",
        start_wd=DECAY,
        end_wd=DECAY,
        wd_incr_steps=100,
        wd_incr_style="constant",
    )
    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    forward_backward = get_forward_backward_func()

    losses = []
    for step in range(steps):
        own = batch(step).to(device).chunk(replicas)[parallel_state.get_data_parallel_rank()]
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        found = forward_backward(
            forward_step_func=forward_step,
            data_iterator=iter(own.chunk(MICRO_BATCHES)),
            model=chunks,
            num_microbatches=MICRO_BATCHES,
            seq_length=LENGTH,
            micro_batch_size=SAMPLES // replicas // MICRO_BATCHES,
            forward_only=False,
        )
        optimizer.step()
        scheduler.step(increment=1)
        loss = torch.stack([one["loss"] for one in found]).mean()
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        losses.append(float(loss) / replicas)
    return losses, slapo.state_dict(sch)


def reference(steps: int = STEPS) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same training in one process, in plain torch."""
    model, losses = make_model(), []
    matrices = [one for one in model.parameters() if one.dim() > 1]
    vectors = [one for one in model.parameters() if one.dim() == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.999), eps=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 100)
    for step in range(steps):
        optimizer.zero_grad()
        tokens = batch(step)
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses, dict(model.state_dict())


def main() -> None:
    needed, found = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if found < needed:
        sys.exit(f"Megatron needs a GPU for each of the {needed} processes (found {found})")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    losses, _ = train(device)
    wanted, _ = reference()
    if dist.get_rank() == 0:
        for step, (loss, one) in enumerate(zip(losses, wanted, strict=True)):
            print(f"step {step}: {loss:.6f}, of the model in one process {one:.6f}")
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
