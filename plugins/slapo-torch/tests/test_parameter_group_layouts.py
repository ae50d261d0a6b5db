"""Groups by reference names train alike under every layout, and are resumed under another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import slapo_core as slapo
from slapo_testing import preload_modules, run_ranks
from tests.support import tied_model
from tests.support.tied_model import adamw, batch, share

preload_modules("torch.distributed.fsdp", "slapo_tp", "slapo_pipeline")
pytestmark = pytest.mark.ranks

GROUPS: dict[str, dict[str, Any]] = {"blocks.1.*": {"lr": 5e-3, "weight_decay": 0.2}, "head.*": {"lr": 1e-3}}
LAYOUTS: tuple[tuple[str, dict[str, int], dict[str, Any]], ...] = (
    ("tp", {"tp": 2}, {}),
    ("fsdp", {"dp": 2}, {"data_parallel": "fsdp"}),
    ("pp", {"pp": 2}, {"microbatches": 2}),
    ("ddp", {"dp": 2}, {}),
)
OPTIONS: dict[str, Any] = {
    "optimizer": adamw,
    "no_decay": ("embedding.*", "scale", "blocks.0.*.bias"),
    "param_groups": GROUPS,
    "max_grad_norm": tied_model.CLIP,
    "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7),
}


def make() -> torch.nn.Module:
    """Without its scalar, which fully_shard does not take."""
    model = tied_model.make().double()
    del model.strength
    model.strength = 1.1  # type: ignore[assignment]
    return model


def cut(sch: slapo.Schedule) -> None:
    if sch.mesh is not None and sch.mesh.size("pp") > 1:
        sch["blocks.0"].pipeline_split()


def built(mesh: dict[str, int] | None, **options: Any) -> tuple[slapo.Schedule, Any]:
    return tied_model.built(mesh, model=make(), steps=cut, **OPTIONS, **options)


def settings(optimizer: torch.optim.Optimizer) -> list[tuple[float, float]]:
    return [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]


def steps(sch: slapo.Schedule, engine: Any, number: int) -> float:
    return float(engine.train_step(share(batch(number), sch.mesh)).grad_norm)


def resumed_in_turn(directory: str) -> dict[str, Any]:
    """One step under each layout, after the checkpoint of the one before."""
    found: dict[str, Any] = {"norms": [], "settings": [], "sizes": []}
    for number, (_, mesh, options) in enumerate(LAYOUTS):
        sch, engine = built(mesh, **options)
        if number:
            engine.load(directory)
        found["settings"].append(settings(engine.optimizer))
        found["sizes"].append([len(group["params"]) for group in engine.optimizer.param_groups])
        found["norms"].append(steps(sch, engine, number))
        engine.save(directory)
        found["weights"] = engine.state_dict()
        engine.close()
    return found


def live_under_fully_shard() -> list[Any]:
    sch = slapo.create_schedule(make(), mesh={"dp": 2})
    slapo.fully_shard(sch)
    groups = slapo.parameter_groups(sch, no_decay=("*.bias", "*norm*"), param_groups={"head.*": {"lr": 1e-3}})
    optimizer = adamw(groups)
    sch.model(**share(batch(0), sch.mesh)).backward()
    optimizer.step()
    return [(len(group["params"]), *pair) for group, pair in zip(groups, settings(optimizer), strict=True)]


def everything(directory: str) -> tuple[Any, Any]:
    return resumed_in_turn(directory), live_under_fully_shard()


def test_groups_are_resumed_from_layout_to_layout(tmp_path: Path) -> None:
    sch, plain = built(None)
    before, norms = [], []
    for number in range(len(LAYOUTS)):
        before.append(settings(plain.optimizer))
        norms.append(steps(sch, plain, number))
    sizes = [len(group["params"]) for group in plain.optimizer.param_groups]
    for rank, (found, live) in enumerate(run_ranks(everything, str(tmp_path), world_size=2)):
        assert found["settings"] == before
        torch.testing.assert_close(found["norms"], norms, rtol=1e-9, atol=0)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(found["weights"][name], value, rtol=1e-8, atol=1e-10)
        assert found["sizes"][0] == found["sizes"][1] == found["sizes"][3] == sizes
        assert 0 in found["sizes"][2], "a stage without a parameter of one group keeps the group"
        assert len(live) == 3
        assert live[0][1:] == (1e-2, 1e-2)
        assert live[1][1:] == (1e-2, 0.0)
        assert live[2] == (1, 1e-3, 1e-2), f"the embedding is called head.weight, too, on rank {rank}"
