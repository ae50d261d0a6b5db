"""Megatron's order string gives the groups of the mesh, rank by rank; a mesh that it cannot have is named."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.parallel_state import RankGenerator

from slapo_core import BuildError, create_schedule
from slapo_core.spec.mesh import DATA_DIMS, Mesh
from slapo_megatron.checking import violations
from slapo_megatron.groups.order import order_of, row, unfit
from tests.messages import Messages

SIZES = [
    {"dp": 2},
    {"tp": 2, "dp": 3},
    {"pp": 2, "tp": 3, "dp": 2},
    {"cp": 2, "tp": 2, "dp": 3},
    {"cp": 2, "pp": 2, "tp": 3},
    {"ep": 2, "dp": 2, "tp": 3},
    {"ep": 2, "pp": 2, "dp": 3},
    {"ep": 2, "pp": 3},
    {"dp": 1, "ep": 2, "pp": 2, "tp": 1},
    {"cp": 2, "ep": 3},
    {"cp": 2, "ep": 2, "pp": 2},
    {"cp": 2, "ep": 2, "dp": 3},
]


def rows(mesh: Mesh, dims: tuple[str, ...]) -> list[list[int]]:
    places = (Mesh(mesh.sizes, rank=rank) for rank in range(mesh.world_size))
    return sorted({tuple(row(place, dims)) for place in places})  # type: ignore[arg-type]


def by_megatron(mesh: Mesh, order: str) -> dict[str, Any]:
    """What ``initialize_model_parallel`` would make, by its own generator of ranks; or the reason why it would not."""
    size = mesh.size
    replicas = size("dp") * size("ep")
    dense = RankGenerator(tp=size("tp"), ep=1, dp=replicas, pp=size("pp"), cp=size("cp"), order=order)
    experts = RankGenerator(tp=size("tp"), ep=size("ep"), dp=size("dp") * size("cp"), pp=size("pp"), cp=1, order=order)
    if not (order.endswith("pp") or size("pp") == 1 or size("dp") * size("cp") == replicas):
        raise AssertionError("pp is not last")
    assert dense.get_ranks("pp") == experts.get_ranks("pp")
    found = {"tp": dense.get_ranks("tp"), "pp": dense.get_ranks("pp"), "cp": dense.get_ranks("cp")}
    return {**found, "ep": experts.get_ranks("ep"), "data": dense.get_ranks("dp-cp")}


def is_that_of_the_mesh(mesh: Mesh, order: str) -> bool:
    try:
        found = by_megatron(mesh, order)
    except (AssertionError, RuntimeError):
        return False
    dims = {"tp": ("tp",), "pp": ("pp",), "cp": ("cp",), "ep": ("ep",), "data": DATA_DIMS}
    return all(sorted(map(tuple, found[name])) == rows(mesh, those) for name, those in dims.items())


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_order_gives_the_groups_of_the_mesh_or_there_is_none(sizes: dict[str, int]) -> None:
    for names in itertools.permutations(sizes):
        mesh = Mesh({name: sizes[name] for name in names})
        if unfit(mesh) is None:
            assert is_that_of_the_mesh(mesh, order_of(mesh)), mesh
        else:
            everything = ("-".join(one) for one in itertools.permutations(("tp", "cp", "ep", "dp", "pp")))
            assert not any(is_that_of_the_mesh(mesh, order) for order in everything), mesh


def test_a_mesh_that_megatron_cannot_have_is_a_violation_with_one_that_it_can(message: Messages) -> None:
    (reason,) = violations(create_schedule(torch.nn.Linear(2, 2), mesh={"dp": 2, "pp": 2, "ep": 2}))
    message(reason.message, "{'dp': 2, 'pp': 2, 'ep': 2}")
    assert reason.hint == "mesh={'pp': 2, 'dp': 2, 'ep': 2}"
    assert unfit(Mesh({"pp": 2, "dp": 2, "ep": 2})) is None
    with pytest.raises(BuildError) as caught:
        order_of(Mesh({"cp": 2, "ep": 2, "dp": 2}))
    assert caught.value.hint == "mesh={'ep': 2, 'dp': 2, 'cp': 2}"


def test_a_device_mesh_is_read_by_its_ranks_not_by_its_dimensions(message: Messages) -> None:
    def device_mesh(ranks: list[list[int]]) -> Mesh:
        stand_in = SimpleNamespace(mesh=torch.tensor(ranks), get_local_rank=lambda name: 0)
        return Mesh({"dp": 2, "tp": 2}, device_mesh=stand_in)  # type: ignore[arg-type]

    assert order_of(device_mesh([[0, 1], [2, 3]])) == "tp-cp-ep-dp-pp"
    assert order_of(device_mesh([[0, 2], [1, 3]])) == "cp-ep-dp-tp-pp"
    assert row(device_mesh([[0, 2], [1, 3]]), ("tp",)) == [0, 2]
    reason = unfit(device_mesh([[0, 3], [1, 2]]))
    assert reason is not None
    message(reason.message, "order", "groups")
