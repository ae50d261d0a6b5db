"""Load checkpoints of format 1: one directory, which one rank wrote as safetensors."""

from __future__ import annotations

import base64
import contextlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.errors import BuildError, ReplicaError, WeightsError, warn_user
from slapo_runtime.checkpoints.manifest import read_manifest
from slapo_runtime.correspondence.storage import optimizer_storage
from slapo_runtime.ranks.consistency import restore
from slapo_runtime.ranks.world import together
from slapo_runtime.weights.files import MANIFEST, checksums, located
from slapo_runtime.weights.module_state import extra_states, packed, resized, unpacked
from slapo_runtime.weights.optimizer_state import OptimizerState
from slapo_runtime.weights.sources import SafetensorsSource, WeightsSource, Wider

if TYPE_CHECKING:
    from slapo_core.layout import Mesh
    from slapo_runtime.correspondence.storage import LiveTensor, OptimizerStorage
    from slapo_runtime.weights.state import Loading, ModelState


MODEL, ADDED, OPTIMIZER = "model.safetensors", "added.safetensors", "optimizer.safetensors"
TRAINED = "trained.safetensors"
ALL = (MODEL, TRAINED, ADDED, OPTIMIZER)
COUNTERS = "counters"  # the name in a runtime's saved state that may be unused


@contextlib.contextmanager
def writing(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors of the file system into a BuildError.

    Raises:
        BuildError: a file or the directory cannot be written.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise BuildError(f"'{os.fspath(directory)}' cannot be written: {type(error).__name__}: {error}") from error


def as_written(error: ReplicaError, directory: str | os.PathLike[str]) -> ReplicaError:
    """Return an error with a note that the first rank's values were written."""
    path = os.fspath(directory)
    text = f"{error.message}\n'{path}' was written with the values of the first rank"
    return ReplicaError(text, tensor=error.tensor, ranks=error.ranks, directory=path, hint=error.hint)


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


def collect_optimizer_state(
    state: ModelState, optimizer: torch.optim.Optimizer | OptimizerStorage | None
) -> OptimizerState | None:
    """Collect an optimizer's state, not yet merged over ``pp``: a collective; None without one."""
    moments: OptimizerState | None = None
    with together(state.mesh, "collecting the optimizer's state"):
        storage = optimizer_storage(optimizer)
        if storage is not None:
            moments = OptimizerState(state, storage)
    if moments is not None:
        moments.gather_ranks()
    return moments


def prepare_loading(
    state: ModelState,
    weights: WeightsSource,
    added: WeightsSource | None,
    moments: OptimizerState | None,
    about_optimizer: Mapping[str, Any] | None,
    tensors: WeightsSource | None,
    runtime: Mapping[str, Any],
    uses: Collection[str],
    label: str,
) -> Loading:
    """Check a checkpoint against the engine, and read this rank's shards, without changes.

    Args:
        state: of the model.
        weights: of the checkpoint.
        added: tensors that steps added.
        moments: of the engine's optimizer, merged; None without one. It is prepared, too.
        about_optimizer: the description of the checkpoint's optimizer; None without one.
        tensors: of its state.
        runtime: of the checkpoint.
        uses: the names in ``runtime`` that the engine loads.
        label: of the checkpoint, for messages.
    """
    loading = state.prepare(weights)
    for live in fitting_added(state, added):
        assert added is not None
        loading.take(live, added.read(live.name, live.layout, state.mesh))
    if moments is not None:
        prepare_optimizer(moments, about_optimizer, tensors, label)
    warn_of_unused(runtime, uses, label)
    return loading


def prepare_optimizer(
    moments: OptimizerState, about: Mapping[str, Any] | None, tensors: WeightsSource | None, label: str
) -> None:
    """Compare an optimizer with the saved one, and prepare to load its state; arguments as above."""
    if about is None:
        raise BuildError(
            f"{label} holds no optimizer state, but this engine has an optimizer",
            hint="load the weights only: build(sch, weights=dir)",
        )
    moments.prepare(about, tensors)


def warn_of_unused(runtime: Mapping[str, Any], uses: Collection[str], label: str) -> None:
    """Warn of saved state that the engine does not load; arguments as above."""
    unused = sorted(set(runtime) - set(uses) - {COUNTERS})
    if unused:
        warn_user(
            f"{label}: ignored, unknown to this engine: {', '.join(unused)}",
        )


def assign_loaded(state: ModelState, moments: OptimizerState | None, loading: Loading, label: str) -> None:
    """Assign the prepared values: a collective."""
    if moments is not None:  # first, because an optimizer may refuse the state, and its own can be restored
        try:
            with together(state.mesh, f"loading the optimizer's state of {label}"):
                moments.load()
        except BaseException:
            moments.take_back()
            raise
    loading.assign()


def packed_extra_states(state: ModelState) -> dict[str, str]:
    """Return the modules' extra state, encoded: a collective."""
    extra = extra_states(state.correspondence, compare=state.is_spread)
    with together(state.mesh, "saving the modules' extra state"):
        return packed(extra)


def _check_sums(path: Path, sums: Mapping[str, Sequence[int]], mesh: Mesh | None) -> None:
    """Refuse damaged files by their checksums; every rank reads its share of the chunks."""
    ranks = [0] if mesh is None or mesh.device_mesh is None else sorted(mesh.device_mesh.mesh.flatten().tolist())
    place = ranks.index(mesh.global_rank) if mesh is not None and len(ranks) > 1 else 0
    for name, expected in sums.items():
        own = range(place, len(expected), len(ranks))
        for number, found in zip(own, checksums(located(path, name, last=MANIFEST), own), strict=True):
            if found != expected[number]:
                raise WeightsError(
                    f"{path / name} is damaged: the checksum of its chunk {number + 1} of {len(expected)} differs from "
                    f"{MANIFEST}",
                    hint="load another checkpoint, or copy this one again",
                )


def refuse_not_json(runtime: Mapping[str, Any]) -> None:
    """Refuse a runtime's state that JSON cannot hold."""
    try:
        json.dumps(runtime, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BuildError(f"the runtime's state must be JSON-serializable: {error}") from error


def _source(directory: Path, name: str) -> SafetensorsSource:
    return SafetensorsSource(located(directory, name, last=MANIFEST))


def fitting_added(state: ModelState, added: WeightsSource | None) -> list[LiveTensor]:
    """Return this rank's tensors that steps added and a checkpoint holds, and warn of others."""
    shapes = added.shapes() if added is not None else {}
    live = {tensor.name: tensor for tensor in state.correspondence.added()}
    fitting = [name for name, tensor in live.items() if shapes.get(name) == tuple(tensor.layout.shape)]
    for names, what in (
        (set(live) - set(fitting), "not in the checkpoint: they keep their values"),
        (set(shapes) - set(fitting), "in the checkpoint, but not in this schedule"),
    ):
        if names:
            warn_user(f"tensors added by replacements, {what}: {', '.join(sorted(names))}")
    return [live[name] for name in fitting if live[name].is_local]


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
