"""Groups by reference names reach the user's optimizer and the one that DeepSpeed makes, with and without ZeRO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import slapo_core as slapo
from slapo_testing import preload_modules, run_ranks
from tests.support.tied_model import GROUPS, batch, share

from .small import built

preload_modules("deepspeed", "slapo_deepspeed.dialect")
pytestmark = pytest.mark.ranks

OWN = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4, "weight_decay": 1e-2, "torch_adam": True}}}
STEPS = 4


def run(sch: slapo.Schedule, engine: Any, steps: range) -> list[float]:
    return [float(engine.train_step(share(batch(step), sch.mesh)).grad_norm) for step in steps]


def in_turn(directory: str) -> dict[str, Any]:
    """Two steps with an optimizer of DeepSpeed's and no ZeRO, two with the user's and ZeRO-3 from its checkpoint."""
    own: Any = {"zero_optimization": {"stage": 0}, **OWN}
    sch, engine = built({"dp": 2}, own, **GROUPS, optimizer=None)
    norms = run(sch, engine, range(2))
    engine.save(directory)
    engine.close()
    sch, engine = built({"dp": 2}, {"zero_optimization": {"stage": 3}}, **GROUPS)
    engine.load(directory)
    norms += run(sch, engine, range(2, STEPS))
    weights = engine.state_dict()
    engine.close()
    return {"norms": norms, "weights": weights}


def test_groups_train_alike_on_deepspeed(tmp_path: Path) -> None:
    sch, plain = built(None, **GROUPS)
    norms = run(sch, plain, range(STEPS))
    assert [len(group["params"]) for group in plain.optimizer.param_groups] == [6, 6, 4, 6, 1]
    for found in run_ranks(in_turn, str(tmp_path), world_size=2):
        torch.testing.assert_close(found["norms"], norms, rtol=1e-4, atol=0)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(found["weights"][name], value, rtol=1e-4, atol=2e-6)
