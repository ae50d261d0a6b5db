"""Promise: a mesh is declared in one way, and what does not fit says what to write."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import slapo_core as slapo
from slapo_core.errors import MeshError
from slapo_core.ranks.launcher import run_ranks
from slapo_core.spec.mesh import Mesh, declare_mesh
from tests.core.small_models import MLP


def _error(call: Callable[[], Any]) -> str:
    with pytest.raises(MeshError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (
            2,
            "mesh must be a dictionary of sizes or a DeviceMesh (got 2)\n"
            '  hint: create_schedule(model, mesh={"tp": 2})',
        ),
        (
            [("tp", 2)],
            "mesh must be a dictionary of sizes or a DeviceMesh (got [('tp', 2)])\n"
            '  hint: create_schedule(model, mesh={"tp": 2})',
        ),
        (
            {"mp": 2},
            "unknown mesh dimension 'mp'; the known ones are dp, pp, cp, ep, tp\n"
            '  hint: create_schedule(model, mesh={"dp": 1, "tp": 2})',
        ),
        (
            {"tp": 0},
            "the size of mesh dimension 'tp' must be a positive integer (got 0)\n"
            '  hint: create_schedule(model, mesh={"tp": 2})',
        ),
        ({"dp": -1}, "the size of mesh dimension 'dp' must be a positive integer (got -1)\n"),
        ({"tp": True}, "the size of mesh dimension 'tp' must be a positive integer (got True)\n"),
        ({"tp": 2.0}, "the size of mesh dimension 'tp' must be a positive integer (got 2.0)\n"),
        ({"tp": "2"}, "the size of mesh dimension 'tp' must be a positive integer (got '2')\n"),
    ],
)
def test_bad_declarations(mesh: Any, message: str) -> None:
    assert _error(lambda: slapo.create_schedule(MLP(), mesh=mesh)).startswith(message)


@pytest.mark.parametrize("rank", [-1, 4, 100])
def test_rank_outside_of_a_dry_mesh(rank: int) -> None:
    assert _error(lambda: slapo.create_schedule(MLP(), mesh={"dp": 2, "tp": 2}, rank=rank)) == (
        f"rank {rank} is outside of the mesh {{'dp': 2, 'tp': 2}}, which has ranks 0 to 3\n"
        "  hint: create_schedule(model, mesh={'dp': 2, 'tp': 2}, rank=0)"
    )


@pytest.mark.parametrize("rank", ["1", 1.0, None, True])
def test_rank_that_is_no_number(rank: Any) -> None:
    assert _error(lambda: declare_mesh({"tp": 2}, rank=rank)) == (
        f"rank must be an integer (got {rank!r})\n  hint: create_schedule(model, mesh={{'tp': 2}}, rank=0)"
    )


def test_dry_mesh_plays_one_rank() -> None:
    places = []
    for rank in range(4):
        mesh = declare_mesh({"dp": 2, "tp": 2}, rank=rank)
        assert mesh is not None
        assert mesh.is_dry
        assert mesh.global_rank == rank
        places.append((mesh.rank("dp"), mesh.rank("tp")))
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert mesh.world_size == 4
    assert (mesh.size("tp"), mesh.size("pp"), mesh.rank("pp")) == (2, 1, 0)
    assert "tp" in mesh
    assert "pp" not in mesh
    assert mesh.group("pp") is None
    assert repr(mesh) == "Mesh({'dp': 2, 'tp': 2}, dry, rank=3)"
    assert copy.deepcopy(mesh) is mesh
    assert _error(lambda: mesh.group("tp")) == (
        "the mesh {'dp': 2, 'tp': 2} is only declared in this process, so mesh_dim 'tp' has no process group\n"
        "  hint: torchrun --nproc-per-node 4 your_script.py"
    )
    mesh.sizes["tp"] = 9
    assert mesh.size("tp") == 2


def test_trivial_mesh_is_not_dry_and_needs_no_group() -> None:
    for sizes in ({"tp": 1}, {"dp": 1, "tp": 1}, {}):
        mesh = declare_mesh(sizes)
        assert mesh is not None
        assert not mesh.is_dry
        assert mesh.group("tp") is None
    assert declare_mesh(None) is None
    assert declare_mesh(mesh) is mesh


def _on_two_ranks() -> dict[str, Any]:
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    mesh = slapo.create_schedule(MLP(), mesh={"tp": 2}).mesh
    assert mesh is not None
    found["real"] = (
        mesh.is_dry,
        mesh.rank("tp"),
        mesh.rank("dp"),
        mesh.global_rank,
        mesh.group("tp").size(),
        str(mesh),
    )
    found["too many"] = _message({"dp": 2, "tp": 2})
    found["too few"] = _message({"tp": 1})
    found["unnamed"] = _message(init_device_mesh("cpu", (2,)))
    adopted = declare_mesh(init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")))
    assert adopted is not None
    found["adopted"] = (adopted.sizes, adopted.rank("tp"), adopted.is_dry, adopted.device_mesh is not None)
    assert mesh.rank("tp") == rank
    return found


def _message(mesh: Any) -> str:
    try:
        declare_mesh(mesh)
    except MeshError as error:
        return str(error)
    return "accepted"


@pytest.mark.ranks
def test_mesh_of_running_processes() -> None:
    results = run_ranks(_on_two_ranks, world_size=2)
    for rank, found in enumerate(results):
        assert found["real"] == (False, rank, 0, rank, 2, "{'tp': 2}")
        assert found["too many"] == (
            "the mesh {'dp': 2, 'tp': 2} needs 4 processes, but torch.distributed runs 2\n"
            "  hint: launch with `torchrun --nproc-per-node 4 your_script.py`, or declare sizes whose product is 2"
        )
        assert found["too few"].startswith("the mesh {'tp': 1} needs 1 processes, but torch.distributed runs 2\n")
        assert found["unnamed"] == (
            "the DeviceMesh has no dimension names\n"
            '  hint: init_device_mesh(device_type, shape, mesh_dim_names=("dp", "tp"))'
        )
        assert found["adopted"] == ({"dp": 1, "tp": 2}, rank, False, True)


def test_mesh_text() -> None:
    assert str(Mesh({"dp": 2, "tp": 4})) == "{'dp': 2, 'tp': 4}"
    assert Mesh({"tp": 4}).launch_command() == "torchrun --nproc-per-node 4 your_script.py"
