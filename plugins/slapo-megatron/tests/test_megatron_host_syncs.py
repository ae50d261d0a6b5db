"""What this engine adds to Megatron's step does not wait for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import slapo_core as slapo
from slapo_testing import run_ranks
from tests.support import tied_model
from tests.support.host_syncs import syncs_of_step

pytestmark = pytest.mark.ranks

DISTRIBUTED = {
    "ddp_config": {"use_distributed_optimizer": True},
    "optimizer_config": {"use_distributed_optimizer": True},
}
CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "replicas": ({"dp": 2}, {"accumulate": 2}),
    "the distributed optimizer": ({"dp": 2}, DISTRIBUTED),
    "stages": ({"pp": 2}, {"microbatches": 2}),
}


def cut(sch: slapo.Schedule) -> None:
    if sch.mesh is not None and sch.mesh.size("pp") > 1:
        sch["blocks.0"].pipeline_split()


def on_two() -> dict[str, list[str]]:
    torch.set_num_threads(1)
    found = {}
    for name, (mesh, options) in CASES.items():
        sch, engine = tied_model.built(mesh, target="megatron", max_grad_norm=tied_model.CLIP, steps=cut, **options)
        batches = [tied_model.share(tied_model.batch(step, 8), sch.mesh) for step in range(3)]
        found[name] = syncs_of_step(engine, batches)
        engine.close()
    return found


def test_no_step_waits_for_a_device() -> None:
    assert run_ranks(on_two, world_size=2) == [{name: [] for name in CASES}] * 2
