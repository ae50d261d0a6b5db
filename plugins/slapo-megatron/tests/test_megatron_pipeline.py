"""Stages in Megatron's 1F1B and interleaved schedules train as the reference model does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_testing import preload_modules, run_ranks
from tests.support import tied_model

pytestmark = pytest.mark.ranks
preload_modules("slapo_megatron.pipeline", "slapo_pipeline.partition.hook", "slapo_tp.hooks")

SAMPLES = 8
TWO, FOUR = ("blocks.0",), ("embedding", "blocks.0", "blocks.1")  # cuts into so many stages
ADAM = {"optimizer": None, "optimizer_config": {"lr": 1e-2, "adam_eps": 1e-4, "adam_beta2": 0.999, "weight_decay": 0.0}}
OF_EACH_REPLICA: dict[str, Any] = {
    **ADAM,
    "optimizer_config": {**ADAM["optimizer_config"], "use_distributed_optimizer": True},
    "ddp_config": {"use_distributed_optimizer": True},
}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, weight_decay=0.0)


PLAIN: dict[str, Any] = {"optimizer": adam}
FREED: dict[str, Any] = {**ADAM, "model_parallel_config": {"deallocate_pipeline_outputs": True}}
OVERLAPPED: dict[str, Any] = {
    **ADAM,
    "model_parallel_config": {"overlap_p2p_comm": True, "deallocate_pipeline_outputs": True},
}
CASES: dict[int, dict[str, tuple[dict[str, int], tuple[str, ...], dict[str, Any]]]] = {
    2: {
        "two stages, a factory's optimizer": ({"pp": 2}, TWO, PLAIN),
        "four stages, two a rank, outputs deallocated": ({"pp": 2}, FOUR, FREED),
        "four stages, two a rank, messages beside computation": ({"pp": 2}, FOUR, OVERLAPPED),
        "four stages, two a rank, distributed optimizer": ({"pp": 2}, FOUR, OF_EACH_REPLICA),
    },
    4: {
        "one stage a rank": ({"pp": 4}, FOUR, FREED),
        "with tp, two stages a rank": ({"tp": 2, "pp": 2}, FOUR, PLAIN),
        "with replicas": ({"dp": 2, "pp": 2}, TWO, ADAM),
        "with replicas, distributed optimizer, two stages a rank": ({"dp": 2, "pp": 2}, FOUR, OF_EACH_REPLICA),
    },
}


def cut(sch: slapo.Schedule, paths: tuple[str, ...]) -> None:
    for path in paths:
        sch[path].pipeline_split()


def on_rank(cases: Any) -> dict[str, Any]:
    from tests.support.cpu_megatron import install

    install()
    found = {}
    for name, (mesh, paths, options) in cases.items():
        sch, engine = tied_model.built(
            mesh,
            target="megatron",
            steps=lambda sch, paths=paths: cut(sch, paths),
            max_grad_norm=tied_model.CLIP,
            microbatches=4,
            **options,
        )
        losses, norms = [], []
        for step in range(3):
            result = engine.train_step(tied_model.share(tied_model.batch(step, SAMPLES), sch.mesh))
            losses.append(float(result.loss))
            norms.append(float(result.grad_norm))
        evaluated = engine.eval_step(tied_model.share(tied_model.batch(9, SAMPLES), sch.mesh))
        state = {key: tensor.clone() for key, tensor in engine.state_dict().items()}
        found[name] = [*losses, float(evaluated.loss)], norms, state
        engine.close()
    return found


def untouched() -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    model = tied_model.make()
    optimizer, losses, norms = adam(model.parameters()), [], []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(**tied_model.batch(step, SAMPLES))
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), tied_model.CLIP)))
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        losses.append(float(model(**tied_model.batch(9, SAMPLES))))
    return losses, norms, model.state_dict()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.breadth)])
def test_stages_train_as_the_reference_model(ranks: int) -> None:
    losses, norms, state = untouched()
    found = run_ranks(on_rank, CASES[ranks], world_size=ranks)
    for name, (mesh, _, _) in CASES[ranks].items():
        assert math.prod(mesh.values()) == ranks
        mean = [sum(values) / ranks for values in zip(*(rank[name][0] for rank in found), strict=True)]
        assert mean == pytest.approx(losses, rel=2e-6), name
        for rank in found:
            assert rank[name][1] == pytest.approx(norms, rel=2e-6), name
            torch.testing.assert_close(rank[name][2], state, rtol=1e-5, atol=1e-6)
