"""The default ``evaluate``: training steps, warm and measured."""

from __future__ import annotations

import math
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only

import slapo_core as slapo
from slapo_core.spec.mesh import DATA_DIMS
from slapo_tune.trials.memory import MemoryMeter

if TYPE_CHECKING:
    from slapo_tune.trials.run import Run

__all__ = ["NotFiniteError", "on", "samples_in", "train"]


class NotFiniteError(ArithmeticError):
    """The loss of a step is NaN or infinite."""


def train(run: Run) -> float:
    """Samples per second of all replicas: the median over the measured steps, each as long as on its slowest rank.

    Fills ``run.measured``: ``memory``, the bytes of all tensors at the peak of the steps (of this rank); ``time``,
    seconds of a step; ``spread``, of the measured steps the longest less the shortest, relative to the median; ``loss``
    of the first step, and ``last_loss`` of the last.

    Raises:
        NotFiniteError: a loss is NaN or infinite.
    """
    study = run.study
    meter = MemoryMeter(run.device)
    with meter.measuring():
        engine = slapo.build(
            run.schedule,
            target=study.target,
            optimizer=study.optimizer,
            loss=study.loss,
            device=None if run.device == "cpu" else run.device,
            **study.options,
        )
        with meter.steps():
            losses = [_step(engine, run)[1] for _ in range(max(2, study.warmup))]
    seconds = []
    for _ in range(study.steps):
        took, loss = _step(engine, run)
        seconds.append(took)
        losses.append(loss)
    _require_finite(losses)
    slowest = _of_the_slowest(seconds)
    median = statistics.median(slowest)
    run.measured |= {
        "memory": meter.peak,
        "time": median,
        "spread": (max(slowest) - min(slowest)) / median,
        "loss": losses[0],
        "last_loss": losses[-1],
    }
    mesh = run.schedule.mesh
    replicas = math.prod(mesh.size(mesh_dim) for mesh_dim in DATA_DIMS) if mesh is not None else 1
    return samples_in(run.batch) * replicas / median


def _step(engine: Any, run: Run) -> tuple[float, float]:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
    _finish(run.device)
    before = time.perf_counter()
    result = engine.train_step(run.batch)
    _finish(run.device)
    return time.perf_counter() - before, float(result.loss)


def _finish(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def _of_the_slowest(seconds: list[float]) -> list[float]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return seconds
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, seconds)
    return [max(step) for step in zip(*every, strict=True)]


def _require_finite(losses: list[float]) -> None:
    for number, loss in enumerate(losses, start=1):
        if not math.isfinite(loss):
            raise NotFiniteError(f"the loss of step {number} is {loss}")


def samples_in(batch: Any) -> int:
    """The length of the first axis of a batch's first tensor that has one."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return len(leaf)
    raise TypeError(
        f"the batch, of type {type(batch).__name__}, has no tensor with samples along its first axis, so samples per "
        "second cannot be told; evaluate= gives another value to maximise"
    )


def on(batch: Any, device: str) -> Any:
    """A batch on a device."""
    return batch if device == "cpu" else tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)
