"""Copies of one tensor on several ranks: which must agree, that a difference is named, and that they can be aligned."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import slapo_core as slapo
from slapo_runtime.correspondence import Correspondence
from slapo_runtime.launcher import run_ranks
from slapo_runtime.ranks.world import ranks_along
from slapo_runtime.replicas import Replica, align_replicas, check_replicas, replicas_of
from tests.support.building import Split, real, split
from tests.support.checkpoints import described


class Counting(nn.Module):
    """A norm with running statistics and two parameters, of which ``split`` takes none."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.fc(x)).square().mean()


def error_of(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except slapo.SlapoError as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def copies(schedule: slapo.Schedule) -> list[Replica]:
    return replicas_of(Correspondence.of(schedule)[0])


def whole_world() -> dict[str, Any]:
    rank = dist.get_rank()
    schedule = split(slapo.create_schedule(real("mlp"), mesh={"dp": 2, "tp": 2}), "mlp")
    mesh, model = schedule.mesh, schedule.model
    assert mesh is not None
    found: dict[str, Any] = {
        "over": {replica.name: replica.over for replica in copies(schedule)},
        "along": [ranks_along(mesh, dims) for dims in (("dp",), ("tp",), ("dp", "tp"))],
        "agree": error_of(check_replicas, mesh, copies(schedule), hint="-"),
    }
    before = model.fc1.weight.detach().clone()
    with torch.no_grad():
        if rank == 3:
            model.fc1.weight.add_(1)
    found["a piece"] = error_of(check_replicas, mesh, copies(schedule), hint="one seed")
    align_replicas(mesh, copies(schedule))
    found["aligned"] = (
        error_of(check_replicas, mesh, copies(schedule), hint="-"),
        torch.equal(before, model.fc1.weight),
    )

    full = slapo.create_schedule(Counting(), mesh={"dp": 2, "tp": 2})
    mesh = full.mesh
    found["statistics over"] = {replica.name: replica.over for replica in copies(full)}
    align_replicas(mesh, copies(full))
    with torch.no_grad():
        full.model.norm.running_mean.fill_(1.0 + rank // 2)  # each replica's own samples
    found["statistics of replicas"] = error_of(check_replicas, mesh, copies(full), hint="-")
    with torch.no_grad():
        if rank % 2:
            full.model.norm.running_mean.add_(1)
            full.model.norm.weight.add_(1)
            full.model.fc.bias[0].add_(1)
    found["several"] = error_of(check_replicas, mesh, copies(full), hint="one seed")
    lacking = [replica for replica in copies(full) if rank != 0]
    found["one rank lacks them"] = error_of(check_replicas, mesh, lacking, hint="-").split("\n")[:2]
    return found


@pytest.mark.ranks
def test_replicas_are_compared_over_their_ranks_and_differences_named() -> None:
    results = run_ranks(whole_world, world_size=4)
    assert all(result == results[0] for result in results)
    found = results[0]
    assert found["over"] == {"fc1.weight": ("dp",), "fc1.bias": ("dp",), "fc2.weight": ("dp",)}
    assert found["along"] == [[[0, 2], [1, 3]], [[0, 1], [2, 3]], [[0, 1, 2, 3]]]
    assert found["agree"] == "fine"
    first, one, three, hint = found["a piece"].split("\n")
    assert first.startswith("ReplicaError: replicas of 'fc1.weight' differ ")
    assert one.startswith("  rank 1: (4, 6), torch.float32, norm ")
    assert three.startswith("  rank 3: (4, 6), torch.float32, norm ")
    assert hint == "  hint: one seed"
    assert found["aligned"] == ("fine", True)

    everywhere, statistics = ("dp", "tp"), ("tp",)
    assert found["statistics over"] == {
        "fc.weight": everywhere,
        "fc.bias": everywhere,
        "norm.weight": everywhere,
        "norm.bias": everywhere,
        "norm.running_mean": statistics,
        "norm.running_var": statistics,
        "norm.num_batches_tracked": statistics,
    }
    assert found["statistics of replicas"] == "fine"
    lines = found["several"].split("\n")
    assert lines[0].startswith("ReplicaError: replicas of 'fc.bias' differ ")
    assert [line[:9] for line in lines[1:5]] == [f"  rank {rank}:" for rank in range(4)]
    assert lines[5:] == ["so do replicas of 'norm.weight', 'norm.running_mean'", "  hint: one seed"]
    assert found["one rank lacks them"][0].startswith("ReplicaError: replicas of 'fc.weight' differ ")
    assert found["one rank lacks them"][1] == "  rank 0: (nothing)"


def test_one_rank_and_a_mesh_that_is_only_declared_have_nothing_to_compare() -> None:
    for mesh in (None, {"tp": 1}, {"tp": 2}):
        schedule = slapo.create_schedule(real("mlp"), mesh=mesh)
        assert copies(schedule) == []
        check_replicas(schedule.mesh, [Replica("fc1.weight", torch.ones(2), ("tp",))], hint="-")
        align_replicas(schedule.mesh, [Replica("fc1.weight", torch.ones(2), ("tp",))])


# -- what a save does with replicas that differ -------------------------------------------------------------------


def saves_of_replicas_that_differ(directory: str) -> dict[str, Any]:
    rank, found = dist.get_rank(), {}
    for name, change in (("rounding", 1e-7), ("apart", 1.0)):
        torch.manual_seed(0)
        schedule = slapo.create_schedule(Counting(), mesh={"tp": 2})
        live = slapo.create_schedule(Counting(), mesh={"tp": 2})
        live["fc"].apply(Split(("weight",)))
        engine: Any = slapo.build(schedule, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        with torch.no_grad():
            schedule.model.norm.weight.mul_(1 + change * rank)
            live.model.norm.weight.mul_(1 + change * rank)
        for what, call in (
            ("save", functools.partial(engine.save, f"{directory}/{name}")),
            ("state_dict", functools.partial(slapo.state_dict, live)),
            ("export", functools.partial(slapo.save_pretrained, live, f"{directory}/{name}-export")),
        ):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    call()
                    outcome: Any = "fine"
                except slapo.ReplicaError as error:
                    values = error.state_dict and error.state_dict["norm.weight"].tolist()
                    outcome = (error.tensor, error.ranks, error.path, error.directory, str(error.hint), values)
            found[f"{name} {what}"] = outcome, sum("within rounding" in str(one.message) for one in caught)
        engine.load(f"{directory}/{name}")
        found[f"{name} loaded"] = schedule.model.norm.weight.tolist()
    return found


@pytest.mark.ranks
def test_replicas_that_differ_are_saved_with_the_first_one_s_values(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(saves_of_replicas_that_differ, str(tmp_path), world_size=2)):
        for what in ("save", "state_dict", "export"):
            assert found[f"rounding {what}"] == ("fine", 1)
            (tensor, ranks, path, _, hint, _), warned = found[f"apart {what}"]
            assert (tensor, ranks, path, warned) == ("norm.weight", (0, 1), "norm", 0)
            assert hint.index("verify") < hint.index("bwd_post") < hint.index("seeds")
            assert ("engine." in hint, "clip_grad_norm_" in hint) == (what == "save", what != "save")
        assert found["apart save"][0][3] == str(tmp_path / "apart")
        assert found["apart export"][0][3] == str(tmp_path / "apart-export")
        assert found["apart state_dict"][0][5] == [1.0 + rank] * 6
        assert found["rounding loaded"] == found["apart loaded"] == [1.0] * 6
    assert "replicas" in described(tmp_path / "apart")
    assert load_file(tmp_path / "apart-export" / "model.safetensors")["norm.weight"].tolist() == [1.0] * 6
