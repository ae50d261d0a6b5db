"""The ranks of a mesh check each other over one group, made once: no save, load or state dict makes another."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import slapo_core as slapo
from slapo_runtime.launcher import run_ranks
from slapo_runtime.ranks.world import World, gather_along
from tests.messages import Messages
from tests.support.building import real, split


def groups_made(call: Callable[[], Any]) -> int:
    with patch.object(dist, "ProcessGroupGloo", side_effect=dist.ProcessGroupGloo) as making:
        call()
    return making.call_count


def scheduled() -> slapo.Schedule:
    return split(slapo.create_schedule(real("mlp"), mesh={"dp": 2, "tp": 2}), "mlp")


def counted() -> dict[str, int]:
    directory = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(directory)
    sch, engines = scheduled(), []
    found = {"live state_dict": groups_made(lambda: slapo.state_dict(sch))}
    made = groups_made(
        lambda: engines.append(slapo.build(sch, optimizer=lambda params: torch.optim.AdamW(params, lr=0.1)))
    )
    engine: Any = engines[0]
    found["build"] = made
    for name, call in (
        ("save", lambda: engine.save(directory[0])),
        ("load", lambda: engine.load(directory[0])),
        ("state_dict", engine.state_dict),
        ("check_replicas", engine.check_replicas),
        ("save again", lambda: engine.save(directory[0])),
    ):
        found[name] = groups_made(call)
    return found


@pytest.mark.ranks
def test_control_group_is_shared_by_save_load_and_checks() -> None:
    calls = ("build", "save", "load", "state_dict", "check_replicas", "save again")
    assert run_ranks(counted, world_size=4) == [{"live state_dict": 1, **dict.fromkeys(calls, 0)}] * 4


def after_errors() -> dict[str, Any]:
    """What the next use answers, and how many groups it makes."""
    rank, found = dist.get_rank(), {}
    sch = scheduled()
    mesh = sch.mesh
    assert mesh is not None

    def use() -> list[int]:
        with World(mesh) as world:
            return world.gather(rank)

    found["at first"] = use()
    try:
        with World(mesh) as world, world.together("painting"):
            if rank == 2:
                raise ValueError("out of paint")
    except (ValueError, slapo.BuildError) as error:
        found["error"] = f"{type(error).__name__}: {error}"
    made: list[int] = []
    found["after an error on all"] = (groups_made(lambda: made.extend(use())), made)
    try:
        with World(mesh):
            if rank == 1:
                raise ValueError("only here, and the others are done")
    except ValueError:
        pass
    made = []
    found["after an error on one"] = (groups_made(lambda: made.extend(use())), made)
    world = World(mesh)
    found["values"] = world.gather_once(rank)
    found["come"] = world.all_come(60), World(mesh).all_come(60), rank != 1 and world.all_come(0.1)
    found["along tp"] = gather_along(mesh, "tp", rank)
    try:
        slapo.state_dict(sch) if rank else slapo.load_state_dict(sch, {})
    except slapo.RankMismatchError as error:
        found["different calls"] = str(error)
    found["at last"] = use()
    return found


@pytest.mark.ranks
def test_an_error_closes_the_group_and_the_next_use_connects_anew(message: Messages) -> None:
    results = run_ranks(after_errors, world_size=4, timeout=120)
    ranks = list(range(4))
    for rank, found in enumerate(results):
        assert found["at first"] == found["at last"] == ranks
        assert found["after an error on all"] == found["after an error on one"] == (1, ranks)
        assert found["values"] == ranks
        assert found["come"] == (True, True, False)
        assert found["along tp"] == ranks[:2] if rank < 2 else ranks[2:]
        assert found["error"].startswith("ValueError" if rank == 2 else "BuildError: painting failed on rank 2")
    message(*{found["different calls"] for found in results}, "rank 0: load_state_dict", "rank 1: state_dict")


def test_a_process_by_itself_makes_none() -> None:
    def use() -> None:
        with World(slapo.create_schedule(real("mlp"), mesh={"tp": 2}).mesh) as world:
            assert world.gather("own") == ["own"]
        assert World(None).gather_once("own") == ["own"]
        assert World(None).all_come(0)

    assert groups_made(use) == 0
