"""A checkpoint in pieces: each rank writes what it holds, once, and reads what it is to hold, under any schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import slapo_core as slapo
from slapo_testing import run_ranks

from .pieces import InMemory, laid_out

MESHES: dict[str, dict[str, int]] = {"tp2": {"tp": 2}, "dp2": {"dp": 2}}


def train(engine: Any) -> dict[str, torch.Tensor]:
    engine.train_step({"x": torch.ones(2)})
    return dict(engine.state_dict())


def saved(engine: Any) -> tuple[dict[str, Any], InMemory]:
    """The description, and the pieces of all ranks."""
    found = engine._state.shards(optimizer=engine.optimizer, runtime={"counters": {"steps": 1}})
    by_rank = [found.own]
    if dist.is_initialized():
        by_rank = [[]] * dist.get_world_size()
        dist.all_gather_object(by_rank, list(found.own))
        assert all(by_rank), "every rank writes something"
    return dict(found.description), InMemory(piece for own in by_rank for piece in own)


def resumed(mesh: dict[str, int] | None, description: dict[str, Any], source: InMemory) -> dict[str, torch.Tensor]:
    engine = laid_out(mesh, seed=1)
    runtime = engine._state.load_shards(description, source, optimizer=engine.optimizer)
    assert runtime == {"counters": {"steps": 1}}
    assert source.asked == 1
    source.asked = 0
    return train(engine)


def on_rank(description: dict[str, Any], alone: InMemory) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, mesh in MESHES.items():
        engine = laid_out(mesh)
        train(engine)
        found[name] = saved(engine)
        found[f"{name} goes on"] = train(engine)
        found[f"{name} from one process"] = resumed(mesh, description, alone)
    for name, mesh in MESHES.items():
        for other in MESHES:
            found[f"{name} from {other}"] = resumed(mesh, *found[other])
    return found


@pytest.mark.ranks
def test_shards_of_any_mesh_load_into_any_other() -> None:
    engine = laid_out(None)
    train(engine)
    description, alone = saved(engine)
    wanted = train(engine)
    found = run_ranks(on_rank, description, alone, world_size=2)
    for rank in found:
        for what, state in rank.items():
            if what not in MESHES:
                torch.testing.assert_close(state, wanted, rtol=0, atol=1e-6, msg=what)
    for name in MESHES:
        theirs, pieces = found[0][name]
        assert theirs == found[1][name][0] == description
        torch.testing.assert_close(resumed(None, theirs, pieces), wanted, rtol=0, atol=1e-6)
    assert ("optimizer", "padded::exp_avg") in alone.full
    assert alone.full["weight", "padded"].shape == (7, 3)


def test_missing_shard_is_refused() -> None:
    """The control: what the comparison above relies on."""
    engine = laid_out(None)
    found = engine._state.shards(optimizer=engine.optimizer)
    packed = next(one for one in found.own if one.name == "packed")
    with pytest.raises(AssertionError, match="packed"):
        InMemory([*found.own, packed])


def test_mismatched_checkpoint_is_refused_before_reading() -> None:
    engine = laid_out(None)
    train(engine)
    description, source = saved(engine)
    before = engine.state_dict()
    del source.full["optimizer", "both::exp_avg"]
    with pytest.raises(slapo.WeightsError, match="lacks 'both::exp_avg'"):
        engine._state.load_shards(description, source, optimizer=engine.optimizer)
    wrong = {**description, "weights": {**description["weights"], "both": [3, 3]}}
    with pytest.raises(slapo.WeightsError, match=r"wrong shape: both must be \(4, 6\) \(got \(3, 3\)\)"):
        engine._state.load_shards(wrong, source, optimizer=engine.optimizer)
    newer = {**description, "format": 9}
    with pytest.raises(slapo.WeightsError, match="in format 9"):
        engine._state.load_shards(newer, source, optimizer=engine.optimizer)
    assert source.asked == 0
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
