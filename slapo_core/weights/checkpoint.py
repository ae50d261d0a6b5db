"""Checkpoints in the untouched model's layout: saved under one schedule, loaded under any other.

A directory holds ``model.safetensors`` (the untouched model's state dict, readable by anybody), where needed
``added.safetensors`` (what replacements added) and ``optimizer.safetensors``, the configurations of a model that has
them as transformers' models do (``config.json``), and ``checkpoint.json``. They are replaced together: who reads finds
the checkpoint before or the new one, wherever a save was interrupted. Those of ours carry the same identifier, so that
files of two checkpoints that were copied into one directory are recognised.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.errors import BuildError, WeightsError
from slapo_core.ranks.world import together
from slapo_core.weights.configurations import write_configurations
from slapo_core.weights.optimizer_state import OptimizerState
from slapo_core.weights.sources import SafetensorsSource
from slapo_core.weights.swap import located, replacing

if TYPE_CHECKING:
    from slapo_core.weights.state import TensorState

__all__ = ["load_checkpoint", "save_checkpoint"]

FORMAT = 1
MODEL, ADDED, OPTIMIZER, MANIFEST = "model.safetensors", "added.safetensors", "optimizer.safetensors", "checkpoint.json"


def save_checkpoint(
    directory: str | os.PathLike[str], state: TensorState, optimizer: torch.optim.Optimizer | None
) -> None:
    """Write weights and optimiser state: a collective; the first rank of the mesh writes.

    Raises:
        RankMismatchError: ranks hold different copies of a tensor, or of the optimiser's state; nothing was written.
        BuildError: the optimiser holds something that has no place in a checkpoint, or writing failed; on every rank.
    """
    mesh = state.mesh
    state.check_replicas(optimizer=optimizer)
    with together(mesh, "saving the optimiser's state"):
        moments = OptimizerState(state, optimizer) if optimizer is not None else None
    if moments is not None:
        moments.meet()
        with together(mesh, "uniting the optimisers' state"):
            moments.unite()
    weights = state.whole(rank0_only=True, include_added=True)
    tensors = moments.gather() if moments is not None else {}
    with together(mesh, f"writing the checkpoint '{directory}'"):
        if mesh is None or mesh.is_first_rank:
            own = {key: weights[key] for key in state.correspondence.survey.keys}
            added = {name: tensor for name, tensor in weights.items() if name not in own}
            manifest = {"format": FORMAT, "optimizer": moments.description() if moments is not None else None}
            model = state.correspondence.tree.root
            _write(Path(directory), {MODEL: own, ADDED: added, OPTIMIZER: tensors}, manifest, model)


def load_checkpoint(
    directory: str | os.PathLike[str], state: TensorState, optimizer: torch.optim.Optimizer | None
) -> None:
    """Read weights and, if the engine has an optimiser, its state; every rank reads its own pieces.

    Raises:
        WeightsError: the directory is no whole checkpoint, or is of another model; nothing was changed.
        BuildError: the optimiser's state does not fit this optimiser; nothing was changed.
    """
    path = Path(directory)
    moments: OptimizerState | None = None
    if optimizer is not None:
        with together(state.mesh, "looking at the optimiser's state"):
            moments = OptimizerState(state, optimizer)
        moments.meet()
    with together(state.mesh, f"reading the checkpoint '{directory}'"):
        manifest = _read_manifest(path)
        loading = state.prepare(_source(path, MODEL))
        loading.values += _read_added(state, _source(path, ADDED) if ADDED in manifest["files"] else None)
        if moments is not None:
            moments.unite()
            if manifest["optimizer"] is None:
                raise BuildError(
                    f"the checkpoint '{path}' holds no optimiser state, and this engine has an optimiser",
                    hint="load the weights only: build(sch, weights=dir)",
                )
            tensors = _source(path, OPTIMIZER) if OPTIMIZER in manifest["files"] else None
            moments.prepare(manifest["optimizer"], tensors)
    if moments is not None:  # first, because an optimiser may refuse what was read, and can be given back its own
        try:
            with together(state.mesh, f"giving the optimiser its state of '{directory}'"):
                moments.load()
        except BaseException:
            moments.take_back()
            raise
    loading.assign()


def _source(directory: Path, name: str) -> SafetensorsSource:
    return SafetensorsSource(located(directory, name, last=MANIFEST))


def _read_added(state: TensorState, added: SafetensorsSource | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    import warnings

    shapes = added.shapes() if added is not None else {}
    live = {tensor.name: tensor for tensor in state.correspondence.added()}
    fitting = [name for name, tensor in live.items() if shapes.get(name) == tuple(tensor.layout.shape)]
    for names, what in (
        (set(live) - set(fitting), "not in the checkpoint, so left as they are"),
        (set(shapes) - set(fitting), "in the checkpoint, but nowhere in this schedule"),
    ):
        if names:
            warnings.warn(f"tensors added by replacements, {what}: {', '.join(sorted(names))}", stacklevel=4)
    if added is None:
        return []
    own = [live[name] for name in fitting if live[name].is_here]
    return [(one.tensor, added.read(one.name, one.layout, state.mesh)) for one in own]


def _write(
    directory: Path, files: Mapping[str, Mapping[str, torch.Tensor]], manifest: dict[str, Any], model: nn.Module
) -> None:
    from safetensors.torch import save_file

    identifier = uuid.uuid4().hex
    written = {name: tensors for name, tensors in files.items() if tensors or name == MODEL}
    manifest = {**manifest, "id": identifier, "files": sorted(written)}
    with replacing(directory, last=MANIFEST) as new:
        for name, tensors in written.items():
            save_file(_unshared(tensors), new / name, metadata={"format": "pt", "slapo_checkpoint": identifier})
        write_configurations(model, new)
        (new / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    for name in set(files) - set(written):
        (directory / name).unlink(missing_ok=True)  # of an earlier checkpoint


def _unshared(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tied names as tensors of their own, as the format wants it, so that a plain model loads them all."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        result[name] = tensor.clone() if id(tensor) in seen else tensor.contiguous()
        seen.add(id(tensor))
    return result


def _read_manifest(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    try:
        manifest: dict[str, Any] = json.loads(located(path, MANIFEST, last=MANIFEST).read_text(encoding="utf-8"))
        if not isinstance(manifest, dict) or {"format", "id", "files", "optimizer"} - set(manifest):
            raise ValueError("it lacks entries")
    except (OSError, ValueError) as error:
        raise WeightsError(
            f"'{path}' is not a checkpoint written by engine.save(): {MANIFEST}: {error}",
            hint="plain weights are loaded with build(sch, weights=dir)",
        ) from error
    if not isinstance(manifest["format"], int) or manifest["format"] > FORMAT:
        raise WeightsError(
            f"the checkpoint '{path}' is in format {manifest['format']!r}; this slapo-core reads up to {FORMAT}",
            hint="pip install --upgrade slapo-core",
        )
    for name in {MODEL, *(name for name in (ADDED, OPTIMIZER) if name in manifest["files"])}:
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
