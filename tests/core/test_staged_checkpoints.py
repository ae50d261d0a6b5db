"""Checkpoints go from any mesh to any other, with stages or without, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import slapo_core as slapo
from slapo_core.ranks.launcher import run_ranks
from tests.core.staged_support import Sizes, batch, build, chain, in_turn, scheduled

MESHES: dict[str, Sizes | None] = {
    "plain": None,
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "pp2tp2": {"pp": 2, "tp": 2},
    "dp2pp2": {"dp": 2, "pp": 2},
}
TWO, FOUR = ("tp2", "pp2"), ("pp2tp2", "dp2pp2")


def save(names: Sequence[str], directory: str, *, then_load: bool = False) -> None:
    """Train on these meshes, on other batches on each, and save; ``then_load``: go on as :func:`load_and_save`."""
    engines = {}
    for name in names:
        mesh = MESHES[name]
        engine = engine_on(mesh, seed=0)
        for number in range(2):
            own = batch(10 * list(MESHES).index(name) + number)
            replicas, place = (engine.mesh.size("dp"), engine.mesh.rank("dp")) if mesh else (1, 0)
            engine.train_step({key: tensor.chunk(replicas)[place] for key, tensor in own.items()})
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.02
        engine.state.save(f"{directory}/{name}", optimizer=engine.optimizer)
        engines[name] = engine
    for name, engine in engines.items() if then_load else ():
        copy_all(engine, name, directory)


def load_and_save(names: Sequence[str], directory: str) -> None:
    for name in names:
        copy_all(engine_on(MESHES[name], seed=1), name, directory)


def engine_on(mesh: Sizes | None, seed: int) -> Any:
    with in_turn():
        return build(scheduled(mesh, model=chain(seed)), max_grad_norm=0.5)


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
    files = ("model.safetensors", "optimizer.safetensors")
    tensors = {f"{file}/{key}": tensor for file in files for key, tensor in load_file(directory / file).items()}
    return tensors, json.loads((directory / "checkpoint.json").read_text())["optimizer"]


@pytest.mark.ranks
def test_a_checkpoint_goes_from_any_mesh_to_any_other_bit_for_bit(tmp_path: Path) -> None:
    save(("plain",), str(tmp_path))
    run_ranks(save, TWO, str(tmp_path), world_size=2)
    run_ranks(save, FOUR, str(tmp_path), then_load=True, world_size=4)
    run_ranks(load_and_save, TWO, str(tmp_path), world_size=2)
    load_and_save(("plain",), str(tmp_path))
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
    save(("plain",), str(tmp_path))
    saved = load_file(tmp_path / "plain" / "model.safetensors")
    lost = {key: tensor for key, tensor in saved.items() if not key.startswith("blocks.3.")}
    engine = engine_on(None, seed=1)
    with pytest.raises(slapo.WeightsError, match=r"missing: blocks\.3\.norm\.weight"):
        engine.state.load_state_dict(lost)
