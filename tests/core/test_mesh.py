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
from slapo_core.layout import Mesh, declare_mesh
from slapo_runtime.launcher import run_ranks
from slapo_testing.models import MLP
from tests.messages import Messages


def _error(call: Callable[[], Any]) -> str:
    with pytest.raises(MeshError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("mesh", "word"),
    [
        (2, "got 2"),
        ([("tp", 2)], "got [('tp', 2)]"),
        ({"mp": 2}, "'mp'"),
        ({"tp": 0}, "got 0"),
        ({"dp": -1}, "got -1"),
        ({"tp": True}, "got True"),
        ({"tp": 2.0}, "got 2.0"),
        ({"tp": "2"}, "got '2'"),
    ],
)
def test_bad_declarations(mesh: Any, word: str, message: Messages) -> None:
    message(_error(lambda: slapo.create_schedule(MLP(), mesh=mesh)), word)


@pytest.mark.parametrize("rank", [-1, 4, 100])
def test_rank_outside_of_a_dry_mesh(rank: int, message: Messages) -> None:
    message(_error(lambda: slapo.create_schedule(MLP(), mesh={"dp": 2, "tp": 2}, rank=rank)), f"rank {rank}", "0 to 3")


@pytest.mark.parametrize("rank", ["1", 1.0, None, True])
def test_rank_that_is_no_number(rank: Any, message: Messages) -> None:
    message(_error(lambda: declare_mesh({"tp": 2}, rank=rank)), f"got {rank!r}")


def test_dry_mesh_plays_one_rank(message: Messages) -> None:
    places = []
    for rank in range(4):
        mesh = declare_mesh({"dp": 2, "tp": 2}, rank=rank)
        assert mesh is not None
        assert mesh.is_abstract
        assert mesh.global_rank == rank
        places.append((mesh.rank("dp"), mesh.rank("tp")))
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert mesh.world_size == 4
    assert (mesh.size("tp"), mesh.size("pp"), mesh.rank("pp")) == (2, 1, 0)
    assert "tp" in mesh
    assert "pp" not in mesh
    assert mesh.group("pp") is None
    assert repr(mesh) == "Mesh({'dp': 2, 'tp': 2}, abstract, rank=3)"
    assert copy.deepcopy(mesh) is mesh
    message(_error(lambda: mesh.group("tp")), "mesh_dim 'tp'", "torchrun --nproc-per-node 4")
    mesh.sizes["tp"] = 9
    assert mesh.size("tp") == 2


def test_trivial_mesh_is_not_dry_and_needs_no_group() -> None:
    for sizes in ({"tp": 1}, {"dp": 1, "tp": 1}, {}):
        mesh = declare_mesh(sizes)
        assert mesh is not None
        assert not mesh.is_abstract
        assert mesh.group("tp") is None
    assert declare_mesh(None) is None
    assert declare_mesh(mesh) is mesh


def _on_two_ranks() -> dict[str, Any]:
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    mesh = slapo.create_schedule(MLP(), mesh={"tp": 2}).mesh
    assert mesh is not None
    found["real"] = (
        mesh.is_abstract,
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
    found["adopted"] = (adopted.sizes, adopted.rank("tp"), adopted.is_abstract, adopted.device_mesh is not None)
    assert mesh.rank("tp") == rank
    sch = slapo.create_schedule(MLP(), mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "model")))
    with pytest.raises(slapo.PreconditionError) as refused:
        sch["head"].shard("weight", axis=1)
    found["own names"] = str(refused.value)
    sch["head"].shard("weight", axis=1, mesh_dim="model")
    found["own names refused"] = _build_error(sch)
    return found


def _build_error(sch: slapo.Schedule) -> str:
    with pytest.raises(slapo.BuildError) as refused:
        slapo.build(sch)
    return str(refused.value)


def _message(mesh: Any) -> str:
    try:
        declare_mesh(mesh)
    except MeshError as error:
        return str(error)
    return "accepted"


@pytest.mark.ranks
def test_mesh_of_running_processes(message: Messages) -> None:
    results = run_ranks(_on_two_ranks, world_size=2)
    for rank, found in enumerate(results):
        assert found["real"] == (False, rank, 0, rank, 2, "{'tp': 2}")
        assert found["adopted"] == ({"dp": 1, "tp": 2}, rank, False, True)
    for case, word in (
        ("too many", "4 processes"),
        ("too few", "1 processes"),
        ("unnamed", "mesh_dim_names"),
        ("own names", 'mesh_dim="model"'),
        ("own names refused", "does not run mesh_dim 'model'"),
    ):
        [text] = {found[case] for found in results}
        message(text, word)


def test_mesh_text() -> None:
    assert str(Mesh({"dp": 2, "tp": 4})) == "{'dp': 2, 'tp': 4}"
    assert Mesh({"tp": 4}).launch_command() == "torchrun --nproc-per-node 4 your_script.py"
    assert Mesh({"dp": 8, "tp": 8}).launch_command() == "torchrun --nnodes 8 --nproc-per-node 8 your_script.py"


def test_an_abstract_mesh_of_a_process_that_torchrun_started_names_the_missing_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = Mesh({"tp": 2})
    assert mesh.launch_hint() == "torchrun --nproc-per-node 2 your_script.py"
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MeshError) as caught:
        mesh.group("tp")
    assert "init_process_group() before create_schedule()" in str(caught.value.hint)
    assert "torchrun --nproc" not in str(caught.value.hint)
