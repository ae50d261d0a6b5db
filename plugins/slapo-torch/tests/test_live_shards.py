"""`slapo.fully_shard` in a loop of one's own trains, clips and exports as one process, and ends the schedule."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import slapo_core as slapo
from slapo_runtime.storage import sharded_over
from slapo_testing import preload_modules, run_ranks

preload_modules("torch.distributed.fsdp", "slapo_tp", "slapo_torch.sharded_data")
pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), *(nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 5)) for _ in "12"))


def make_batch(step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, clip: Any) -> float:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    model(batch)  # to look at the output: it leaves full parameters without gradients
    norm = float(clip())
    with torch.no_grad():
        model(batch)  # full parameters that the step does not reach
    optimizer.step()
    return norm


def sharded(mesh: dict[str, int]) -> slapo.Schedule:
    sch = slapo.create_schedule(make_model().double(), mesh=mesh)
    if mesh.get("tp", 1) > 1:
        for block in ("1", "2"):
            sch[f"{block}.0"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
            sch[f"{block}.2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    sch["1"].checkpoint()
    sch["[12]"].fully_shard()
    slapo.fully_shard(sch)
    return sch


def train(sch: slapo.Schedule, optimizer: torch.optim.Optimizer, number: int) -> float:
    mesh = sch.mesh
    replicas = mesh.size("dp_replicate") * mesh.size("dp")
    place = mesh.rank("dp_replicate") * mesh.size("dp") + mesh.rank("dp")
    share = make_batch(number).chunk(replicas)[place]
    return step(sch.model, optimizer, share, lambda: slapo.clip_grad_norm_(sch, 0.1))


def live(mesh: dict[str, int], directory: str) -> dict[str, Any]:
    sch = sharded(mesh)
    optimizer = adamw(sch.model.parameters())
    norms = [train(sch, optimizer, number) for number in range(3)]
    refused = []
    for call in (sch.undo, lambda: sch["0"].checkpoint()):
        with pytest.raises(slapo.SealedError) as caught:
            call()
        refused.append(str(caught.value))
    with pytest.raises(slapo.SealedError, match="cannot call fully_shard"):
        slapo.fully_shard(sch)
    slapo.save_pretrained(sch, directory)
    state, moments = slapo.state_dict(sch), slapo.optimizer_state_dict(sch, optimizer)
    again = sharded(mesh)
    resumed = adamw(again.model.parameters())
    slapo.load_state_dict(again, state)
    slapo.load_optimizer_state_dict(again, resumed, moments)
    norms.append(train(again, resumed, 3))
    late = slapo.create_schedule(make_model().double(), mesh=mesh)
    stale = adamw(late.model.parameters())
    slapo.fully_shard(late)
    with pytest.raises(slapo.OptimizerError, match="replaced by a step, by undo or by fully_shard"):
        train(late, stale, 0)
    return {
        "norms": norms,
        "state": copy.deepcopy(state),
        "resumed": copy.deepcopy(slapo.state_dict(again)),
        "moments": moments,
        "sharded": all(sharded_over(parameter) for parameter in sch.model.parameters()),
        "refused": refused,
    }


@pytest.mark.parametrize("mesh", [{"dp_replicate": 2, "dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_live_sharded_training_equals_one_process(mesh: dict[str, int], tmp_path: Path) -> None:
    model = make_model().double()
    optimizer = adamw(model.parameters())
    norms = [
        step(model, optimizer, make_batch(number), lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        for number in range(3)
    ]
    state = copy.deepcopy(model.state_dict())
    norms.append(step(model, optimizer, make_batch(3), lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
    for found in run_ranks(live, mesh, str(tmp_path), world_size=4):
        assert found["norms"] == pytest.approx(norms, rel=1e-12)
        for name, tensor in state.items():
            torch.testing.assert_close(found["state"][name], tensor, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(found["resumed"][name], model.state_dict()[name], rtol=1e-10, atol=1e-12)
        assert found["sharded"]
        assert all("sealed by slapo_core.fully_shard" in text for text in found["refused"])
        assert found["moments"]["state"]["0.weight"]["exp_avg"].shape == (5, 6)
    (saved,) = tmp_path.glob("*.safetensors")
    for name, tensor in load_file(saved).items():
        torch.testing.assert_close(tensor, state[name], rtol=1e-10, atol=1e-12)
