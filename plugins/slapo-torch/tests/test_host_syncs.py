"""A training step of target torch does not wait for the device: nothing that it computes with is read by the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_runtime.gradients import GradientClipper
from slapo_runtime.launcher import run_ranks
from slapo_runtime.state import ModelState
from tests.support import tied_model
from tests.support.host_syncs import host_syncs, syncs_of_step

CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "replicas and shards": ({"dp": 2, "tp": 2}, {"accumulate": 2}),
    "replicas of stages": ({"dp": 2, "pp": 2}, {"microbatches": 2}),
}


def count(batch: Any) -> torch.Tensor:
    return (batch["labels"] != -100).sum()


def cut(sch: slapo.Schedule) -> None:
    if sch.mesh is not None and sch.mesh.size("pp") > 1:
        sch["blocks.0"].pipeline_split()


def syncs(mesh: dict[str, int] | None, options: dict[str, Any]) -> list[str]:
    sch, engine = tied_model.built(mesh, steps=cut, max_grad_norm=tied_model.CLIP, loss_weight=count, **options)
    batches = [tied_model.share(tied_model.batch(step, 8), sch.mesh) for step in range(3)]
    found = syncs_of_step(engine, batches)
    engine.close()
    return found


def on_four() -> dict[str, list[str]]:
    torch.set_num_threads(1)
    return {name: syncs(*case) for name, case in CASES.items()}


@pytest.mark.ranks
def test_no_step_of_several_ranks_waits_for_a_device() -> None:
    for found in run_ranks(on_four, world_size=4):
        assert found == {name: [] for name in CASES}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_no_step_of_one_rank_waits_for_a_device(accumulate: int) -> None:
    assert syncs(None, {"accumulate": accumulate}) == []


def test_losses_counted_by_the_model_do_not_wait() -> None:
    class Counted(nn.Linear):
        def forward(self, x: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x).square().sum() / num_items_in_batch

    engine = slapo.build(slapo.create_schedule(Counted(3, 1)), optimizer=tied_model.adamw, accumulate=2)
    batch = {"x": torch.ones(4, 3), "num_items_in_batch": torch.tensor(4)}
    assert syncs_of_step(engine, [batch] * 3) == []


def test_a_norm_that_must_be_finite_is_read_and_that_is_seen() -> None:
    """The observer sees what waits: the clipper does, on demand."""
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    correspondence = ModelState.of(slapo.create_schedule(model)).correspondence
    with host_syncs() as found:
        GradientClipper(correspondence, 1.0).clip()
    assert not found
    with host_syncs() as found:
        GradientClipper(correspondence, 1.0, error_if_nonfinite=True).clip()
    assert any("clip" in one for one in found)
