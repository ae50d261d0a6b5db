"""Megatron's groups on real ranks: made, joined, kept, let go of, compared rank by rank."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import slapo_core as slapo
from slapo_testing import run_ranks
from tests.messages import Messages
from tests.support import tied_model

pytestmark = pytest.mark.ranks


def said(call: Any) -> str:
    try:
        call()
    except slapo.SlapoError as error:
        return str(error)
    return "nothing"


def mesh_of(**sizes: int) -> Any:
    return slapo.create_schedule(torch.nn.Linear(1, 1), mesh=sizes).mesh


def kept_and_released() -> dict[str, Any]:
    from megatron.core import parallel_state

    from slapo_megatron.groups import acquire_groups, start
    from slapo_megatron.private import groups_of_megatron, is_alive, timeout_minutes

    found: dict[str, Any] = {}
    before = set(dist.distributed_c10d._world.pg_map)
    start(mesh_of(dp=2, tp=2))
    groups, first = groups_of_megatron(), acquire_groups()
    held = set(dist.distributed_c10d._world.pg_map) - before
    found["made"] = len(groups) > 10 and set(groups) <= held
    found["waits as long"] = timeout_minutes() < 30 and all(is_alive(one) for one in groups)
    start(mesh_of(dp=2, tp=2, pp=1))
    second = acquire_groups()
    found["same mesh, same groups"] = groups_of_megatron() == groups
    found["in use"] = said(lambda: start(mesh_of(tp=4)))
    second()
    second()
    found["still in use"] = said(lambda: start(mesh_of(tp=4))) == found["in use"]
    first()
    start(mesh_of(pp=2, dp=2))
    found["gone"] = not any(is_alive(one) for one in groups)
    found["pp"] = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    start(mesh_of(dp=4), instances=2)
    part = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
    found["two instances"] = part.size() == 2
    parallel_state.destroy_model_parallel()
    return found


def joined() -> dict[str, Any]:
    from megatron.core import parallel_state

    from slapo_megatron.groups import start

    found: dict[str, Any] = {}
    parallel_state.initialize_model_parallel(2, 1, order="dp-tp")
    own = parallel_state.get_tensor_model_parallel_group()
    found["other ranks of the same size"] = said(lambda: start(mesh_of(dp=2, tp=2)))
    found["other sizes"] = said(lambda: start(mesh_of(pp=2, tp=2)))
    start(mesh_of(tp=2, dp=2))
    found["theirs"] = parallel_state.get_tensor_model_parallel_group() is own
    found["script groups are never destroyed"] = "do not match the mesh" in said(lambda: start(mesh_of(tp=4)))
    parallel_state.destroy_model_parallel()
    _, engine = tied_model.built({"tp": 2, "dp": 2}, target="megatron")
    found["after theirs"] = parallel_state.get_tensor_model_parallel_group() is not own
    engine.close()

    def failing(parameters: Any) -> Any:
        raise ValueError("no optimizer today")

    try:
        tied_model.built({"dp": 4}, target="megatron", optimizer=failing)
    except Exception as error:  # noqa: BLE001 - whose traceback keeps the build's frames
        found["no engine"] = str(error)
        _, engine = tied_model.built({"tp": 4}, target="megatron", steps=None)
        engine.close()
    found["alone"] = said(lambda: tied_model.built(None, target="megatron"))
    return found


def on_four() -> dict[str, Any]:
    from tests.support.cpu_megatron import install

    install()
    os.environ.pop("LOCAL_RANK", None)
    return {"kept": kept_and_released(), "joined": joined()}


@pytest.fixture(scope="module")
def on_ranks() -> list[dict[str, Any]]:
    return run_ranks(on_four, world_size=4)


def test_groups_stay_for_the_same_mesh_and_are_made_again_for_another(
    on_ranks: list[dict[str, Any]], message: Messages
) -> None:
    (in_use,) = {rank["kept"].pop("in use") for rank in on_ranks}
    message(in_use, "an open engine", "{'tp': 4}")
    for number, rank in enumerate(on_ranks):
        found = rank["kept"]
        assert found.pop("pp") == [number % 2, number % 2 + 2]
        assert found == dict.fromkeys(found, True)


def test_groups_of_the_users_script_are_compared_rank_by_rank(
    on_ranks: list[dict[str, Any]], message: Messages
) -> None:
    first = on_ranks[0]["joined"]
    message(
        first["other ranks of the same size"], "{'dp': 2, 'tp': 2}", "ranks [0, 2]", "('tp') [0, 1]", "('dp') [0, 2]"
    )
    message(first["other sizes"], "pipeline model parallel ranks [0]", "('pp') [0, 2]")
    (alone,) = {rank["joined"]["alone"] for rank in on_ranks}
    message(alone, "mesh {} has 1 ranks", "4 processes")
    for rank in on_ranks:
        assert rank["joined"]["theirs"]
        assert rank["joined"]["script groups are never destroyed"]
        assert rank["joined"]["after theirs"]
        assert "no optimizer today" in rank["joined"]["no engine"]
