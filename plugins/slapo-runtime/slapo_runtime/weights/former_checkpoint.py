"""Load checkpoints of format 1: one directory, which one rank wrote as safetensors."""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slapo_core.errors import WeightsError
from slapo_runtime.checkpoints.manifest import MANIFEST, check_sums, read_manifest
from slapo_runtime.ranks.consistency import restore
from slapo_runtime.ranks.world import together
from slapo_runtime.weights.checkpoint_contents import assign_loaded, collect_optimizer_state, prepare_loading
from slapo_runtime.weights.files import located
from slapo_runtime.weights.module_state import resized, unpacked
from slapo_runtime.weights.sources import SafetensorsSource, WeightsSource, Wider

if TYPE_CHECKING:
    import torch

    from slapo_core.layout import Mesh
    from slapo_runtime.correspondence.storage import OptimizerStorage
    from slapo_runtime.weights.state import ModelState

MODEL, ADDED, OPTIMIZER = "model.safetensors", "added.safetensors", "optimizer.safetensors"
TRAINED = "trained.safetensors"
ALL = (MODEL, TRAINED, ADDED, OPTIMIZER)


def load_former_checkpoint(
    path: Path,
    state: ModelState,
    optimizer: torch.optim.Optimizer | OptimizerStorage | None,
    uses: Collection[str],
) -> dict[str, Any]:
    """Load a checkpoint of format 1; every rank reads its own shards.

    Returns:
        the runtime's further state.

    Raises:
        WeightsError: the directory is not a complete checkpoint, or of another model; nothing was changed.
        BuildError: the state does not fit this optimizer; nothing was changed.
    """
    moments = collect_optimizer_state(state, optimizer)
    label = f"the checkpoint '{path}'"
    with together(state.mesh, f"reading {label}"):
        manifest = _read_manifest(path)
        _check_sums(path, manifest.get("checksums", {}), state.mesh)
    with resized(state.correspondence, manifest.get("buffers", {})):
        with together(state.mesh, f"reading {label}"):
            weights: WeightsSource = _source(path, MODEL)
            if TRAINED in manifest["files"]:
                weights = Wider(weights, _source(path, TRAINED), state.correspondence.survey.keys)
            weights.extra = unpacked(manifest.get("extra", {}))
            added = _source(path, ADDED) if ADDED in manifest["files"] else None
            if moments is not None:
                moments.merge()
            tensors = _source(path, OPTIMIZER) if OPTIMIZER in manifest["files"] else None
            runtime = dict(manifest.get("runtime") or {})
            loading = prepare_loading(
                state, weights, added, moments, manifest["optimizer"], tensors, runtime, uses, label
            )
        assign_loaded(state, moments, loading, label)
    states = manifest.get("random", {}).get(str(state.mesh.rank("dp") if state.mesh is not None else 0), {})
    restore({device: base64.b64decode(content) for device, content in states.items()})
    return runtime


def _read_manifest(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    manifest = read_manifest(located(path, MANIFEST, last=MANIFEST).parent)
    if {"files", "optimizer"} - set(manifest):
        raise WeightsError(f"the description of the checkpoint '{path}' is damaged: {MANIFEST} lacks entries")
    for name in {MODEL, *(name for name in ALL if name in manifest["files"])}:
        try:
            with safe_open(located(path, name, last=MANIFEST), framework="pt") as handle:
                identifier = (handle.metadata() or {}).get("slapo_checkpoint")
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{path / name} cannot be read as safetensors: {error}") from error
        if identifier != manifest["id"]:
            raise WeightsError(
                f"the files in '{path}' are of two different saves ({name} does not belong to {MANIFEST})",
                hint="load an earlier checkpoint, or the weights alone with build(sch, weights=dir)",
            )
    return manifest


def _check_sums(path: Path, sums: Mapping[str, Sequence[int]], mesh: Mesh | None) -> None:
    """Refuse damaged files by their checksums; every rank reads its share of the chunks."""
    ranks = [0] if mesh is None or mesh.device_mesh is None else sorted(mesh.device_mesh.mesh.flatten().tolist())
    place = ranks.index(mesh.global_rank) if mesh is not None and len(ranks) > 1 else 0
    for name, expected in sums.items():
        check_sums(located(path, name, last=MANIFEST), expected, part=(place, len(ranks)))


def _source(directory: Path, name: str) -> SafetensorsSource:
    return SafetensorsSource(located(directory, name, last=MANIFEST))
