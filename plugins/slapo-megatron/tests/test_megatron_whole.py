"""Without a pipeline, Megatron's DistributedDataParallel and optimizers train as the untouched model does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slapo_core.testing import run_ranks
from tests import tied_model

pytestmark = pytest.mark.ranks


def on_rank(forms: dict[str, tuple[dict[str, int], dict[str, Any]]]) -> dict[str, Any]:
    from tests.cpu_megatron import install

    install()
    found = {}
    for name, (mesh, options) in forms.items():
        sch, engine = tied_model.built(mesh, target="megatron", max_grad_norm=tied_model.CLIP, **options)
        losses, norms = [], []
        for step in range(3):
            result = engine.train_step(tied_model.share(tied_model.batch(step), sch.mesh))
            losses.append(float(result.loss))
            norms.append(float(result.grad_norm))
        found[name] = losses, norms, engine.state_dict()
        engine.close()
    return found


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}], ids=str)
def test_two_processes_train_as_one(mesh: dict[str, int]) -> None:
    losses, norms, state = tied_model.trained()
    found = run_ranks(on_rank, {"plain": (mesh, {})}, world_size=2)
    for name in found[0]:
        mean = [sum(values) / 2 for values in zip(*(rank[name][0] for rank in found), strict=True)]
        assert mean == pytest.approx(losses, rel=2e-6)
        for rank in found:
            assert rank[name][1] == pytest.approx(norms, rel=2e-6)
            torch.testing.assert_close(rank[name][2], state, rtol=1e-5, atol=1e-6)
