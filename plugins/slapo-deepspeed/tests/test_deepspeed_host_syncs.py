"""What this engine adds to DeepSpeed's step does not wait for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import slapo_core as slapo
from slapo_testing import run_ranks
from tests.support import tied_model
from tests.support.host_syncs import syncs_of_step

pytestmark = pytest.mark.ranks

CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "without ZeRO": ({"dp": 2}, {"gradient_accumulation_steps": 2}),
    "ZeRO-1": ({"dp": 2}, {"zero_optimization": {"stage": 1}}),
    "stages": ({"pp": 2}, {"gradient_accumulation_steps": 2}),
}


def cut(sch: slapo.Schedule) -> None:
    if sch.mesh is not None and sch.mesh.size("pp") > 1:
        sch["blocks.0"].pipeline_split()


def on_two() -> dict[str, list[str]]:
    torch.set_num_threads(1)
    found = {}
    for name, (mesh, config) in CASES.items():
        clipped = {"gradient_clipping": tied_model.CLIP, **config}
        sch, engine = tied_model.built(mesh, target="deepspeed", config=clipped, steps=cut)
        batches = [tied_model.share(tied_model.batch(step, 8), sch.mesh) for step in range(3)]
        found[name] = syncs_of_step(engine, batches)
        engine.close()
    return found


def test_no_step_waits_for_a_device() -> None:
    assert run_ranks(on_two, world_size=2) == [{name: [] for name in CASES}] * 2
