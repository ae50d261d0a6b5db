"""``checkpoint-*/`` of a Trainer: which are complete, and the RNG state of each rank by its place in the mesh."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import slapo_core as slapo
from slapo_core import Mesh, Schedule, WeightsError
from slapo_transformers.accelerators import replica_rank

MANIFEST = "slapo.json"
"""The file that a save writes last, with the names of all others: a checkpoint without one of them is not complete."""


def newest(directory: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint; None if there is none."""
    found = [
        (int(match[1]), path)
        for path in Path(directory).glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name)) and _is_complete(path)
    ]
    return max(found)[1] if found else None


def _is_complete(checkpoint: Path) -> bool:
    """Return whether the manifest and all of its files are there: a deletion may have been killed midway."""
    try:
        names: list[str] = json.loads((checkpoint / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        return False
    return all((checkpoint / name).is_file() for name in names)


def write_manifest(directory: Path, mesh: Mesh | None) -> None:
    """Write the manifest to the disk, in one step."""
    files = sorted(path.name for path in directory.iterdir() if path.is_file())
    text = json.dumps({"format": 1, "mesh": {} if mesh is None else mesh.sizes, "files": files})
    partial = directory / f"{MANIFEST}.partial"
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(directory / MANIFEST)


def with_adapter(sch: Schedule, checkpoint: Path) -> dict[str, Any]:
    """Return the weights of a model of peft with the adapter of a checkpoint, which holds nothing else.

    Args:
        sch: the schedule of the model.
        checkpoint: with ``adapter_model.safetensors``.

    Raises:
        WeightsError: the adapter has other tensors than the model's.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import load_file

    model: Any = sch.model
    weights = slapo.state_dict(sch)
    own = get_peft_model_state_dict(model, state_dict={key: key for key in weights})  # saved name -> own name
    saved = load_file(checkpoint / "adapter_model.safetensors")
    if set(saved) != set(own):
        differing = sorted(set(saved) ^ set(own))
        raise WeightsError(
            f"the adapter in '{checkpoint}' has other tensors than the model: {', '.join(differing[:3])}",
            hint="get_peft_model(model, LoraConfig(...)) with the configuration of the saved adapter",
        )
    return {**weights, **{own[name]: value for name, value in saved.items()}}


def rng_file(mesh: Mesh | None, rank: int) -> str:
    """Return the name of a rank's file: ``"rng_state_dp1_tp0.pth"``.

    Args:
        mesh: of the schedule.
        rank: global, where there is no mesh.
    """
    return f"rng_state_{rank}.pth" if mesh is None else _name(mesh.sizes, {dim: mesh.rank(dim) for dim in mesh.sizes})


@contextlib.contextmanager
def rng_directory(checkpoint: Path, mesh: Mesh | None, rank: int, names: list[str]) -> Iterator[Path | None]:
    """Give the host a directory with the RNG state of this rank, under the names where it looks for it.

    Of a checkpoint under another mesh it is the state of the rank at the same place, modulo its sizes; of one without
    a mesh that of the same replica.

    Args:
        checkpoint: of any of these hosts.
        mesh: of the schedule.
        rank: global.
        names: of the file.
    """
    file = _saved_state(checkpoint, mesh, rank)
    if file is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as place:
        for name in names:
            shutil.copyfile(file, Path(place) / name)
        yield Path(place)


def _saved_state(checkpoint: Path, mesh: Mesh | None, rank: int) -> Path | None:
    saved: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError):
        saved = json.loads((checkpoint / MANIFEST).read_text())
    if sizes := saved.get("mesh"):
        own = {"dp": rank} if mesh is None else {dim: mesh.rank(dim) for dim in mesh.sizes}
        return checkpoint / _name(sizes, {dim: own.get(dim, 0) % size for dim, size in sizes.items()})
    files = sorted(checkpoint.glob("rng_state_*.pth"), key=lambda file: int(file.stem.rpartition("_")[2]))
    alone = checkpoint / "rng_state.pth"
    if files:
        return files[replica_rank(mesh, rank) % len(files)]
    return alone if alone.is_file() else None


def _name(sizes: dict[str, int], place: dict[str, int]) -> str:
    dims = [dim for dim, size in sizes.items() if size > 1]
    return "_".join(["rng_state", *(f"{dim}{place[dim]}" for dim in dims)]) + ".pth"
