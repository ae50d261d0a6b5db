"""A LightningModule, and runs of it by Lightning alone and under a schedule, with what they log and save."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import SumMetric

import slapo_core as slapo
from slapo_lightning import SlapoStrategy

SAMPLES, BATCH = 24, 8
LAYOUTS: dict[str, dict[str, int]] = {
    "tp": {"dp": 1, "tp": 4},
    "dp x tp": {"dp": 2, "tp": 2},
    "fsdp x tp": {"dp": 2, "tp": 2},
}
MESHES = {**LAYOUTS, "hsdp": {"dp_replicate": 2, "dp": 2, "tp": 1}}
SHARDED = ("fsdp x tp", "hsdp")


def replicas_of(name: str) -> int:
    return MESHES[name].get("dp_replicate", 1) * MESHES[name]["dp"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down, self.last = nn.Linear(6, 8), nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 1)
        self.last.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.last(hidden + self.down(self.up(hidden).relu())).squeeze(-1)


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)  # of which those of the first rank are taken
        self.model, self.samples = Net(), SumMetric()
        self.register_buffer("scale", torch.tensor(2.0))
        self.norms: list[float] = []
        self.exchanged: list[bool] = []  # whether each backward exchanged gradients over replicas

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, targets = (one.to(self.scale.dtype) for one in batch)
        return self.scale * (self.model(inputs) - targets).square().mean()

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.samples.update(len(batch[0]))
        self.log("samples", self.samples, on_epoch=True)
        self.log("summed", float(len(batch[0])), sync_dist=True, reduce_fx="sum", on_epoch=True)
        self.log("quality", self.loss(batch), sync_dist=True)
        self.log("own", self.current_epoch * (-1.0) ** self.global_rank)  # which checkpoint is best differs by rank

    test_step = validation_step

    def predict_step(self, batch: Any, number: int) -> torch.Tensor:
        return self.all_gather(self.model(batch[0].to(self.scale.dtype))).flatten()

    def on_after_backward(self) -> None:
        wrapped: Any = self.trainer.strategy.model  # of DistributedDataParallel; fully_shard leaves no gradient without
        self.exchanged.append(getattr(wrapped, "require_backward_grad_sync", self.model.up.weight.grad is not None))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, SlapoStrategy):
            norm = slapo.clip_grad_norm_(strategy.sch, math.inf)
        else:
            norm = nn.utils.clip_grad_norm_(self.parameters(), math.inf)
        self.norms.append(float(norm))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW((one for one in self.parameters() if one.requires_grad), lr=0.02, eps=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 6, generator=draw, dtype=torch.float64)
    return TensorDataset(inputs, torch.randn(SAMPLES, generator=draw, dtype=torch.float64))


def split(sch: slapo.Schedule) -> None:
    sch["up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    sch["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def split_and_shard(sch: slapo.Schedule) -> None:
    split(sch)
    slapo.fully_shard(sch)


def quiet() -> None:
    for one in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(one).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def trainer_of(strategy: Any, devices: int, **options: Any) -> L.Trainer:
    return L.Trainer(
        **{"accelerator": "cpu", "devices": devices, "strategy": strategy, "precision": "64-true", "logger": False}
        | {"gradient_clip_val": 0.5, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1}
        | {"num_sanity_val_steps": 0, "enable_checkpointing": False, "log_every_n_steps": 1}
        | options
    )


class Losses(L.Callback):
    """The loss of each batch, and the rate that its step was made with."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append((float(trainer.callback_metrics["loss"]), trainer.optimizers[0].param_groups[0]["lr"]))


def loaders(replicas: int) -> tuple[DataLoader, DataLoader]:
    """Of training, in Lightning's order of several processes; of validation."""
    own = DistributedSampler(data(), 1, 0, shuffle=True) if replicas == 0 else None
    size = BATCH // max(replicas, 1)
    return DataLoader(data(), batch_size=size, sampler=own), DataLoader(data(), batch_size=size)


def fitted(
    directory: Path, name: str | None, *, epochs: int = 1, resume: Path | None = None, accumulate: int = 1
) -> dict[str, Any]:
    """What a run logs; the checkpoint of its last epoch is written into a directory of its own.

    Args:
        directory: of all runs.
        name: of a layout; None for Lightning alone.
        epochs: the last one.
        resume: the checkpoint to go on from.
        accumulate: the batches of a step.
    """
    quiet()
    mesh = MESHES[name] if name is not None else {}
    devices, replicas = math.prod(mesh.values()), replicas_of(name) if name is not None else 0
    steps = split_and_shard if name in SHARDED else split
    losses, saved = Losses(), ModelCheckpoint(directory, "{epoch}", save_top_k=-1)
    best = ModelCheckpoint(directory / "best", "best", monitor="own", mode="max")
    trainer = trainer_of(
        SlapoStrategy(steps, mesh) if mesh else "auto", devices, max_epochs=epochs, callbacks=[losses, saved, best],
        enable_checkpointing=True, accumulate_grad_batches=accumulate,
    )  # fmt: skip
    (training, validation), module = loaders(replicas), Module()
    if name is None:
        module = module.double()  # Lightning loads a checkpoint before it converts the module
    two = epochs == 2 and resume is None
    trainer.fit(module, training, validation, ckpt_path=resume, weights_only=True)
    logged = _logged(trainer.callback_metrics)
    tested = trainer.test(module, validation, verbose=False)[0]
    earlier = trainer.test(module, validation, ckpt_path=directory / "epoch=0.ckpt", verbose=False)[0] if two else {}
    return {
        "losses": losses.seen,
        "norms": module.norms,
        "exchanged": module.exchanged,
        "logged": logged,
        "tested": _logged(tested),
        "earlier": _logged(earlier),
    }


def _logged(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if name != "own"}


def saved(file: Path) -> list[torch.Tensor]:
    """The tensors of a checkpoint's weights and optimizer, in the order of the model."""
    state = torch.load(file, weights_only=True)
    moments = state["optimizer_states"][0]
    names = [name for group in moments["param_groups"] for name in group["params"]]
    of = [moments["state"][name][kind] for name in names for kind in ("step", "exp_avg", "exp_avg_sq")]
    return [*(state["state_dict"][name] for name in sorted(state["state_dict"])), *of]
