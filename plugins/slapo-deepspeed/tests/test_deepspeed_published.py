"""The examples of transformers train, unchanged: on two replicas, as plain PyTorch trains on both their batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
from slapo_testing import preload_modules, run_ranks

preload_modules("deepspeed", "slapo_deepspeed.dialect")

CONFIGS = Path(__file__).parent / "configs"
STEPS, RATE = 5, 1e-2


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE, eps=1e-4)


def _batch(step: int, replica: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + replica))


def _loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def _trained(file: str) -> list[float]:
    engine = slapo.build(
        slapo.create_schedule(_model(), mesh={"dp": 2}),
        target="deepspeed",
        config=CONFIGS / file,
        optimizer=_adamw,
        loss=_loss,
    )
    losses = [float(engine.train_step(_batch(step, dist.get_rank())).loss) for step in range(STEPS)]
    assert engine.deepspeed.get_lr() == [RATE]  # that of the factory, at the end of the warm-up
    engine.close()
    return losses


def _both() -> list[list[float]]:
    return [_trained(f"ds_config_zero{stage}.json") for stage in (2, 3)]


def _plain() -> list[list[float]]:
    """Both replicas' losses in plain PyTorch, with the clipping and the warm-up of the Trainer's defaults."""
    model = _model()
    optimizer = _adamw(model.parameters())
    found = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE if step > 1 else 0.0  # WarmupLR of DeepSpeed over no steps
        losses = [_loss(model(_batch(step, replica)), _batch(step, replica)) for replica in range(2)]
        optimizer.zero_grad()
        (sum(losses) / 2).backward()  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append([float(loss.detach()) for loss in losses])
    return found


@pytest.mark.ranks
def test_the_examples_of_transformers_train_unchanged() -> None:
    expected = _plain()
    for replica, found in enumerate(run_ranks(_both, world_size=2)):
        for losses in found:
            assert losses == pytest.approx([step[replica] for step in expected], rel=1e-5)
    assert expected[-1] != pytest.approx(expected[0], rel=1e-3)
