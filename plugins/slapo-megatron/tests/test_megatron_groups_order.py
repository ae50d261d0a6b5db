"""Megatron's order string gives the groups of the mesh, rank by rank; what Megatron cannot have is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from megatron.core.parallel_state import RankGenerator

import slapo_megatron
from slapo_core import BuildError, build, create_schedule
from slapo_core.layout import Mesh
from slapo_megatron.groups import order_of
from tests.messages import Messages

SIZES = [
    {"dp": 2},
    {"tp": 2, "dp": 3},
    {"pp": 2, "tp": 3, "dp": 2},
    {"dp": 1, "pp": 2, "tp": 1},
]


def rows(mesh: Mesh, mesh_dim: str) -> list[list[int]]:
    """The ranks that differ in nothing but their place along a dimension."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world_size):
        place = Mesh(mesh.sizes, rank=rank)
        found.setdefault(tuple(place.rank(name) for name in mesh.sizes if name != mesh_dim), []).append(rank)
    return sorted(found.values())


def is_that_of_the_mesh(mesh: Mesh, order: str) -> bool:
    """Compare with what ``initialize_model_parallel`` would make, by Megatron's own generator of ranks."""
    sizes = {name: mesh.size(name) for name in ("tp", "dp", "pp")}
    made = RankGenerator(ep=1, cp=1, order=order, **sizes)
    return all(sorted(made.get_ranks(name)) == rows(mesh, name) for name in sizes)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_order_gives_the_groups_of_the_mesh(sizes: dict[str, int]) -> None:
    for names in itertools.permutations(sizes):
        mesh = Mesh({name: sizes[name] for name in names})
        assert is_that_of_the_mesh(mesh, order_of(mesh)), mesh


@pytest.mark.parametrize("mesh_dim", ["cp", "ep"])
def test_dimensions_that_mean_nothing_yet_are_refused(mesh_dim: str, message: Messages) -> None:
    schedule = create_schedule(torch.nn.Linear(2, 2), mesh={mesh_dim: 2})
    for run in (slapo_megatron.plan, lambda sch: build(sch, target="megatron", optimizer=torch.optim.AdamW)):
        with pytest.raises(BuildError) as caught:
            run(schedule)
        message(caught, f"it does not run mesh_dim '{mesh_dim}' (size 2)")
