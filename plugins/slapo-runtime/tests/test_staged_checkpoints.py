"""Checkpoints go from any mesh to any other, with stages or without, bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import slapo_core as slapo
from slapo_runtime.launcher import run_ranks
from slapo_runtime.weights.checkpoint_source import Part
from slapo_runtime.weights.optimizer_groups import RankState, StateTensor, merge
from tests.support.checkpoints import described, stored
from tests.support.staged import Sizes, batch, build, in_turn, scheduled

MESHES: dict[str, Sizes | None] = {
    "plain": None,
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "pp2tp2": {"pp": 2, "tp": 2},
    "dp2pp2": {"dp": 2, "pp": 2},
}


def everywhere(directory: str) -> None:
    """Save from every mesh that these four ranks make, and copy all checkpoints through all of them."""
    meshes: dict[str, DeviceMesh] = {}
    for name, sizes in MESHES.items():
        if sizes is not None:
            grid = torch.arange(math.prod(sizes.values())).view(tuple(sizes.values()))
            meshes[name] = DeviceMesh("cpu", grid, mesh_dim_names=tuple(sizes))  # some of two ranks only
    engines = {name: engine_on(mesh) for name, mesh in meshes.items() if dist.get_rank() < mesh.size()}
    for name, engine in engines.items():
        train_and_save(engine, name, directory)
    dist.barrier()
    for name, engine in engines.items():
        copy_all(engine, name, directory)


def engine_on(mesh: DeviceMesh | None) -> Any:
    with in_turn():
        return build(scheduled(mesh), max_grad_norm=0.5)


def train_and_save(engine: Any, name: str, directory: str) -> None:
    """On batches of its own, so that no two checkpoints are alike."""
    replicas, place = (engine.mesh.size("dp"), engine.mesh.rank("dp")) if engine.mesh is not None else (1, 0)
    for number in range(2):
        full = batch(10 * list(MESHES).index(name) + number)
        engine.train_step({key: tensor.chunk(replicas)[place] for key, tensor in full.items()})
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.02
    engine.state.save(f"{directory}/{name}", optimizer=engine.optimizer)


def copy_all(engine: Any, name: str, directory: str) -> None:
    """Every checkpoint into this engine, and out again."""
    for source in MESHES:
        engine.state.load(f"{directory}/{source}", optimizer=engine.optimizer)
        assert {group["lr"] for group in engine.optimizer.param_groups} == {0.02}
        engine.state.save(f"{directory}/{source}-{name}", optimizer=engine.optimizer)
    weights = engine.state.state_dict()
    engine.state.load_state_dict({key: tensor + 1 for key, tensor in weights.items()})
    assert all(torch.equal(tensor, weights[key] + 1) for key, tensor in engine.state.state_dict().items())


def contents(directory: Path) -> tuple[dict[str, Any], Any]:
    tensors = {f"{part}/{key}": one for part in PARTS for key, one in stored(directory, part).items()}
    return tensors, described(directory)["optimizer"]


PARTS: tuple[Part, Part] = ("model", "optimizer")


@pytest.mark.breadth
@pytest.mark.ranks
def test_a_checkpoint_goes_from_any_mesh_to_any_other_bit_for_bit(tmp_path: Path) -> None:
    engine = engine_on(None)
    train_and_save(engine, "plain", str(tmp_path))
    run_ranks(everywhere, str(tmp_path), world_size=4)
    copy_all(engine, "plain", str(tmp_path))
    plain, plain_groups = contents(tmp_path / "plain")
    for source in MESHES:
        saved, groups = contents(tmp_path / source)
        assert saved.keys() == plain.keys()
        assert [sorted(group["params"]) for group in groups["groups"]] == [
            sorted(group["params"]) for group in plain_groups["groups"]
        ]
        for target in MESHES:
            again, groups_again = contents(tmp_path / f"{source}-{target}")
            assert sorted(groups_again["groups"][0]["params"]) == sorted(groups["groups"][0]["params"])
            assert groups_again["groups"][1]["hyperparameters"] == groups["groups"][1]["hyperparameters"]
            assert again.keys() == saved.keys()
            for key, tensor in saved.items():
                assert torch.equal(again[key], tensor), (source, target, key)


def test_a_stage_that_is_left_out_is_missed(tmp_path: Path) -> None:
    """The comparison above sees it, and so does whoever loads."""
    engine = engine_on(None)
    train_and_save(engine, "plain", str(tmp_path))
    saved = stored(tmp_path / "plain")
    lost = {key: tensor for key, tensor in saved.items() if not key.startswith("blocks.3.")}
    with pytest.raises(slapo.WeightsError, match=r"missing: blocks\.3\.norm\.weight"):
        engine.state.load_state_dict(lost)


def test_optimizers_of_stages_are_united_group_by_group() -> None:
    held = {"a::m": StateTensor((), (3,), torch.float32)}
    one = RankState([{"params": ["b", "a"], "hyperparameters": {"lr": 0.1}}], {"a": {"t": 1}}, held)
    other = RankState([{"params": ["c", "a"], "hyperparameters": {"lr": 0.1}}], {}, held)
    united = merge([one, other], ["a", "b", "c"])
    assert united.groups == [{"params": ["a", "b", "c"], "hyperparameters": {"lr": 0.1}}]
    assert united.scalars == {"a": {"t": 1}}
    assert united.held == {"a::m": StateTensor((0, 1), (3,), torch.float32)}
