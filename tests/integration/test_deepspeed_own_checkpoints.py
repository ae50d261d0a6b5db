"""DeepSpeed's own checkpoints of a scheduled model, for the same mesh."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from slapo_testing import preload_modules, run_ranks
from tests.integration.deepspeed.states import different
from tests.integration.dialects.small import build, train

preload_modules("deepspeed", "slapo_tp", "slapo_pipeline")


def one_group(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, weight_decay=0.1)


def own(form: str, directory: Path) -> list[str]:
    """Two steps and saved; loaded into another engine, and two steps on: what differs."""
    engine = build(form, padded=False, optimizer=one_group)
    train(engine, 0, 2)
    engine.deepspeed.save_checkpoint(str(directory), tag="two")
    two = engine.state_dict()
    train(engine, 2, 4)
    again = build(form, padded=False, optimizer=one_group, seed=7)
    again.deepspeed.load_checkpoint(str(directory), tag="two")
    found = different(again.state_dict(), two)
    train(again, 2, 4)
    return found + different(again.state_dict(), engine.state_dict())


def all_of(forms: list[str], directory: Path) -> dict[str, list[str]]:
    return {form: own(form, directory / form) for form in forms}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("forms", "world_size"),
    [
        (["ZeRO-1 tp2", "ZeRO-1 dp2"], 2),
        pytest.param(["ZeRO-1 pp2 tp2"], 4, marks=pytest.mark.breadth),
    ],
    ids=["two ranks", "a pipeline"],
)
def test_training_goes_on_from_deepspeeds_own_checkpoint(tmp_path: Path, forms: list[str], world_size: int) -> None:
    found = run_ranks(all_of, forms, tmp_path, world_size=world_size, timeout=1800)
    assert found == [{form: [] for form in forms}] * world_size
