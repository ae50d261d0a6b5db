"""Stages on ranks of their own train what one process trains: norms over all of them, ties summed and counted once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import slapo_core as slapo
from slapo_runtime.launcher import run_ranks
from tests.support.staged import Sizes, batch, build, chain, grouped, in_turn, plain_step, scheduled

STEPS = 3


def train(mesh: Sizes, *, v_shape: bool = False) -> dict[str, Any]:
    with in_turn() as dialect:
        if v_shape:
            dialect.ranks = staticmethod(lambda stages, pp: (*range(pp), *reversed(range(pp))))
        engine = build(scheduled(mesh, cuts=2 * mesh["pp"] if v_shape else None), max_grad_norm=0.5)
    replicas, place = engine.mesh.size("dp"), engine.mesh.rank("dp")
    norms = []
    for number in range(STEPS):
        own = {name: tensor.chunk(replicas)[place] for name, tensor in batch(number).items()}
        norms.append(engine.train_step(own))
    engine.state.check_replicas(optimizer=engine.optimizer)
    live = engine.state.tensors()
    here = engine.mesh.rank("pp")
    return {
        "norms": norms,
        "state": engine.state.state_dict(),
        "first only": engine.state.state_dict(rank0_only=True),
        "stand-ins": sorted(one.name for one in live if one.tensor.is_meta),
        "elsewhere": sorted(name for name, ranks in engine.context.placement.reference.items() if here not in ranks),
        "is_local": all(one.is_local != one.tensor.is_meta for one in live),
        "trained": sorted({id(p) for group in engine.optimizer.param_groups for p in group["params"]})
        == sorted({id(one.tensor) for one in live if one.is_parameter and one.is_local}),
        "tied": engine.module.head.weight is engine.module.embed.weight,
        "ranks": engine.context.stage_ranks,
    }


def without_sums() -> tuple[torch.Tensor, str]:
    """The same step, where nobody sums the gradients of the embedding."""
    with in_turn():
        engine = build(scheduled({"pp": 2}), max_grad_norm=0.5)
    engine.sums_ties = False
    norm = engine.train_step(batch(0))
    with pytest.raises(slapo.RankMismatchError) as error:
        engine.state.check_replicas()
    with pytest.warns(UserWarning, match=r"replicas of 'embed\.weight' differ"):
        engine.state.check_replicas(repair=True)
    engine.state.check_replicas()
    return norm, str(error.value)


def with_a_stale_stand_in() -> list[str]:
    """A tensor of this rank's own that somebody put onto the meta device."""
    with in_turn():
        engine = build(scheduled({"pp": 2}))
    block = engine.module.blocks[engine.mesh.rank("pp")]  # the second rank's is a stand-in by right
    block.up.weight = torch.nn.Parameter(torch.empty_like(block.up.weight, device="meta"))
    messages = []
    for call in (engine.state.state_dict, engine.state.check_replicas):
        with pytest.raises((slapo.WeightsError, slapo.BuildError)) as error:  # of the rank itself, and of the other
            call()
        messages.append(str(error.value))
    return messages


def other_batches() -> str:
    with in_turn():
        engine = build(scheduled({"pp": 2}))
    with pytest.raises(slapo.RankMismatchError) as error:
        engine.train_step(batch(engine.mesh.rank("pp")))
    return str(error.value)


def on_two() -> dict[str, Any]:
    return {
        "pp2": train({"pp": 2}),
        "v": train({"pp": 2}, v_shape=True),
        "without sums": without_sums(),
        "stale": with_a_stale_stand_in(),
        "batches": other_batches(),
    }


def on_four() -> dict[str, Any]:
    meshes: list[Sizes] = [{"pp": 2, "tp": 2}, {"dp": 2, "pp": 2}, {"pp": 4}]
    return {str(mesh): train(mesh) for mesh in meshes}


def plain() -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    model = chain()
    optimizer = grouped(list(model.parameters()))
    return [plain_step(model, optimizer, batch(number)) for number in range(STEPS)], model.state_dict()


def check(result: dict[str, Any], rank: int) -> None:
    norms, state = plain()
    torch.testing.assert_close(result["norms"], norms, rtol=1e-12, atol=0)
    assert list(result["state"]) == list(state)
    for name, tensor in state.items():
        torch.testing.assert_close(result["state"][name], tensor, rtol=1e-11, atol=1e-13)
    assert list(result["first only"]) == (list(state) if rank == 0 else [])
    assert result["stand-ins"] == result["elsewhere"] != []
    assert result["is_local"]
    assert result["trained"]
    assert result["tied"]


@pytest.mark.ranks
def test_stages_on_two_ranks_train_as_one_process() -> None:
    results = run_ranks(on_two, world_size=2)
    (true_norm, *_), _ = plain()
    for rank, result in enumerate(results):
        check(result["pp2"], rank)
        check(result["v"], rank)
        assert result["pp2"]["ranks"] == (0, 1)
        assert result["v"]["ranks"] == (0, 1, 1, 0)
        norm, text = result["without sums"]
        assert abs(norm - true_norm) > 1e-3
        assert text.startswith("replicas of 'embed.weight' differ ")
        assert "\n  rank 0: " in text
        assert "neither" not in text
        for told in result["stale"]:
            assert "'blocks.0.up.weight' is on the meta device" in told
        assert "ranks disagree about the batch" in result["batches"]


@pytest.mark.ranks
def test_stages_with_other_mesh_dims_train_as_one_process() -> None:
    for rank, result in enumerate(run_ranks(on_four, world_size=4)):
        for outcome in result.values():
            check(outcome, rank)
