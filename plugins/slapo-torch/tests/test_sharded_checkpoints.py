"""Checkpoints of sharded replicas: every rank writes its own rows, finds them alone, and reads no others."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import slapo_core as slapo
from slapo_runtime.checkpoints.manifest import Manifest
from slapo_runtime.launcher import run_ranks
from tests.support.building import adam, batches, real, split
from tests.support.checkpoints import newest

LAYOUTS: dict[str, dict[str, int]] = {
    "fsdp2": {"dp": 2},
    "fsdp2 x tp2": {"dp": 2, "tp": 2},
    "hsdp": {"dp_replicate": 2, "dp": 2},
}


def engine_on(mesh: dict[str, int] | None, seed: int = 0) -> Any:
    schedule = slapo.create_schedule(real("mlp", seed=seed).double(), mesh=mesh)
    if mesh is not None and "tp" in mesh:
        split(schedule, "mlp")
    return slapo.build(schedule, optimizer=adam, **({"data_parallel": "fsdp"} if mesh is not None else {}))


def train(engine: Any, first: int, last: int) -> dict[str, torch.Tensor]:
    mesh = engine._state.mesh
    replicas, place = 1, 0
    if mesh is not None:
        replicas = mesh.size("dp_replicate") * mesh.size("dp")
        place = mesh.rank("dp_replicate") * mesh.size("dp") + mesh.rank("dp")
    for number, batch in enumerate(batches(last)):
        if number >= first:
            engine.train_step({name: value.double().chunk(replicas)[place] for name, value in batch.items()})
    state: dict[str, torch.Tensor] = engine.state_dict()
    return state


@contextmanager
def nothing_gathered() -> Iterator[None]:
    """Full tensors of DTensors are an error."""

    def refused(self: Any, **_: Any) -> Any:
        raise AssertionError("a DTensor is gathered")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "full_tensor", refused)
        yield


def through(name: str, directory: str) -> dict[str, torch.Tensor]:
    """Resume a checkpoint of one process, save it, and go on after loading that."""
    engine = engine_on(LAYOUTS[name], seed=3)
    train(engine, 0, 1)
    compared = name == "hsdp"  # over dp_replicate, in full tensors, before it is written
    with nothing_gathered():
        engine.load(f"{directory}/plain")
    with contextlib.nullcontext() if compared else nothing_gathered():
        engine.save(f"{directory}/{name}", asynchronous=compared)
    engine._state.saving.wait()
    other = engine_on(LAYOUTS[name], seed=4)
    with nothing_gathered():
        other.load(f"{directory}/{name}")
    return train(other, 2, 4)


@pytest.mark.ranks
@pytest.mark.parametrize("name", LAYOUTS)
def test_shards_go_from_one_process_through_every_layout_and_back(name: str, tmp_path: Path) -> None:
    plain = engine_on(None)
    train(plain, 0, 2)
    plain.save(tmp_path / "plain")
    size = math.prod(LAYOUTS[name].values())
    states = run_ranks(through, name, str(tmp_path), world_size=size)
    manifest = Manifest.read(newest(tmp_path / name))
    written = dict.fromkeys(range(size), 0)
    for tensor in manifest.tensors.values():
        counts = [math.prod(chunk.extent) for chunk in tensor.chunks]
        assert sum(counts) == math.prod(tensor.shape)
        for chunk, count in zip(tensor.chunks, counts, strict=True):
            written[int(chunk.file.removeprefix("__").partition("_")[0])] += count
    total = sum(written.values())
    assert all(0 < count <= 0.75 * total for count in written.values()), written
    assert len({chunk.file for chunk in manifest.tensors["optimizer.fc1.weight::exp_avg"].chunks}) == min(
        size, LAYOUTS[name]["dp"] * LAYOUTS[name].get("tp", 1)
    )
    expected = train(plain, 2, 4)
    for state in states:
        assert all(torch.allclose(state[key], value, rtol=1e-10, atol=1e-12) for key, value in expected.items())
    back = engine_on(None, seed=5)
    back.load(tmp_path / name)
    again = train(back, 2, 4)
    assert all(torch.equal(again[key], value) for key, value in expected.items())
    assert not dist.is_initialized()
