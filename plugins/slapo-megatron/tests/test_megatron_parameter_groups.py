"""Groups by reference names reach the user's optimizer under Megatron; for its own one they are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import slapo_core as slapo
from slapo_testing import preload_modules, run_ranks
from tests.support.tied_model import GROUPS, batch, built, share

preload_modules("slapo_megatron.dialect", "slapo_tp")
pytestmark = pytest.mark.ranks

LAYOUTS: tuple[tuple[dict[str, int], dict[str, Any]], ...] = (
    ({"tp": 2}, {"target": "megatron"}),
    ({"dp": 2}, {"target": "megatron", "optimizer_config": {"use_distributed_optimizer": True}}),
)


def in_turn(directory: str) -> dict[str, Any]:
    """Two steps under each layout, after the checkpoint of the one before."""
    found: dict[str, Any] = {"norms": []}
    for number, (mesh, options) in enumerate(LAYOUTS):
        sch, engine = built(mesh, **GROUPS, **options)
        if number:
            engine.load(directory)
        for step in (2 * number, 2 * number + 1):
            found["norms"].append(float(engine.train_step(share(batch(step), sch.mesh)).grad_norm))
        engine.save(directory)
        found["weights"] = engine.state_dict()
        engine.close()
    try:
        built({"tp": 2}, target="megatron", **GROUPS, optimizer=None, optimizer_config={"lr": 1e-2})
    except slapo.BuildError as error:
        found["refused"] = error.message, error.hint
    return found


def test_groups_train_alike_on_megatron(tmp_path: Path) -> None:
    _, plain = built(None, **GROUPS)
    norms = [float(plain.train_step(batch(step)).grad_norm) for step in range(4)]
    for found in run_ranks(in_turn, str(tmp_path), world_size=2):
        torch.testing.assert_close(found["norms"], norms, rtol=1e-4, atol=0)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(found["weights"][name], value, rtol=1e-4, atol=2e-6)
        assert "decoupled_lr" in found["refused"][0]
        assert "optimizer=" in found["refused"][1]
