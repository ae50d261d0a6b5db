"""Load checkpoints: every rank reads its own rectangles, one tensor after the other."""

from __future__ import annotations

import base64
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.errors import WeightsError, warn_user
from slapo_runtime.checkpoints.manifest import MANIFEST, Manifest, newest_checkpoint, read_manifest
from slapo_runtime.ranks.consistency import restore
from slapo_runtime.ranks.world import World, together
from slapo_runtime.weights.checkpoint_contents import (
    assign_optimizer,
    collect_optimizer_state,
    fitting_added,
    prepare_optimizer,
    warn_of_unused,
)
from slapo_runtime.weights.checkpoint_source import CheckpointSource, is_step
from slapo_runtime.weights.files import located
from slapo_runtime.weights.former_checkpoint import load_former_checkpoint
from slapo_runtime.weights.module_state import chosen, resized, set_extra_states
from slapo_runtime.weights.saving import replica_of
from slapo_runtime.weights.sources import check_names, read_tensor

if TYPE_CHECKING:
    from slapo_runtime.correspondence.storage import OptimizerStorage
    from slapo_runtime.weights.optimizer_state import OptimizerState
    from slapo_runtime.weights.state import ModelState


def load_checkpoint(
    directory: str | os.PathLike[str],
    state: ModelState,
    optimizer: torch.optim.Optimizer | OptimizerStorage | None,
    uses: Collection[str],
) -> dict[str, Any]:
    """Load weights and optimizer state; every rank reads its own shards.

    Returns:
        the runtime's further state.

    Raises:
        WeightsError: the directory holds no complete checkpoint, or one of another model; nothing was changed. Or a
            file could not be read after all checks, and the weights are loaded in part, as the message says.
        BuildError: the state does not fit this optimizer; nothing was changed.
    """
    state.saving.wait()
    path, manifest = _found(Path(directory), state)
    if manifest is None:
        state.saving.steps = 0
        return load_former_checkpoint(path, state, optimizer, uses)
    sources = (
        CheckpointSource(path, "model", manifest),
        CheckpointSource(path, "added", manifest),
        CheckpointSource(path, "optimizer", manifest),
    )
    weights, label = sources[0], sources[0].label
    with World(state.mesh) as world, world.together(f"reading {label}"):
        weights.check_files(part=(world.index, world.size))
    moments = collect_optimizer_state(state, optimizer)
    runtime = dict(manifest.description.get("runtime") or {})
    with resized(state.correspondence, manifest.description.get("buffers", {})):
        load = _Load(state, moments, *sources)
        with together(state.mesh, f"reading {label}"):
            load.prepare(manifest.description)
            warn_of_unused(runtime, uses, label)
            _warn_of_attached(state, manifest, label)
        load.assign()
    with together(state.mesh, f"loading the attached objects of {label}"):
        for name, own in (manifest.description.get("attached") or {}).items():
            if name in state.saving.attached:
                state.saving.attached[name].load_state_dict(own)
    state.saving.steps = manifest.step
    states = manifest.random.get(replica_of(state.mesh), {})
    restore({device: base64.b64decode(content) for device, content in states.items()})
    return runtime


class _Load:
    """Load one checkpoint into the tensors of this rank.

    Args:
        state: of the model.
        moments: of the engine's optimizer, not yet merged; None without one.
        weights: of the checkpoint.
        added: tensors that steps added.
        tensors: of the checkpoint's optimizer state.
    """

    def __init__(
        self,
        state: ModelState,
        moments: OptimizerState | None,
        weights: CheckpointSource,
        added: CheckpointSource,
        tensors: CheckpointSource,
    ) -> None:
        self._state, self._moments = state, moments
        self._weights, self._added, self._tensors = weights, added, tensors

    def prepare(self, description: Mapping[str, Any]) -> None:
        """Compare names and shapes, and read this rank's optimizer state; nothing is changed."""
        state = self._state
        self._names = check_names(state.correspondence.survey, self._weights)
        self._extra = chosen(state.correspondence, self._weights.extra, self._weights.label)
        self._fitting = fitting_added(state, self._added)
        if self._moments is not None:
            self._moments.merge()
            prepare_optimizer(self._moments, description["optimizer"], self._tensors, self._weights.label)

    def assign(self) -> None:
        """Assign the optimizer state, then read and assign one weight after the other."""
        mesh, label = self._state.mesh, self._weights.label
        assign_optimizer(self._state, self._moments, label)
        with together(mesh, f"reading {label}"):
            try:
                self._assign_weights()
            except Exception as error:
                raise WeightsError(
                    f"{label} was loaded in part, because reading it failed: {error}",
                    hint="engine.load(directory) of a complete checkpoint, before the next step",
                ) from error
        set_extra_states(self._state.correspondence, self._extra)

    def _assign_weights(self) -> None:
        state, storage, mesh = self._state, self._state.storage, self._state.mesh
        for live, specs in state.correspondence.translated():
            if live.is_local:
                storage.loading(live, state.read_translated(self._weights, self._names, live, specs))()
        for live, spec in state.correspondence.carried():
            if spec.keys and live.is_local:
                name = self._names[spec.name]
                storage.loading(live, self._weights.read_like(name, live.layout, mesh, live.tensor))()
        for live in self._fitting:
            storage.loading(live, self._added.read_like(live.name, live.layout, mesh, live.tensor))()
        specs_by_name = state.correspondence.survey.specs
        for name in state.dropped:
            state.dropped[name] = read_tensor(self._weights, self._names[name], specs_by_name[name])


def _found(directory: Path, state: ModelState) -> tuple[Path, Manifest | None]:
    """Return the directory of the checkpoint that all ranks load, and its manifest: a collective.

    None instead of a manifest is for a checkpoint of format 1.
    """
    with World(state.mesh) as world:
        path = directory
        with world.together(f"reading the checkpoint '{directory}'"):
            if not is_step(directory):
                newest = newest_checkpoint(directory)  # before a former checkpoint beside it, which is older
                if newest is None and not located(directory, MANIFEST, last=MANIFEST).is_file():
                    raise WeightsError(
                        f"'{directory}' is not a checkpoint written by engine.save(): it holds no {MANIFEST}, and no "
                        "step-<number> with one",
                        hint="plain weights are loaded with build(sch, weights=dir)",
                    )
                path = newest or directory
        path = world.gather(path)[0]  # the first rank decides: a save may end at this moment
        manifest: Manifest | None = None
        with world.together(f"reading the checkpoint '{path}'"):
            file = located(path, MANIFEST, last=MANIFEST)
            if read_manifest(file.parent)["format"] != 1:
                manifest = Manifest.read(path)
    return path, manifest


def _warn_of_attached(state: ModelState, manifest: Manifest, label: str) -> None:
    saved, own = set(manifest.description.get("attached") or {}), set(state.saving.attached)
    if own - saved:
        warn_user(f"{label} holds no state of attached objects: they keep theirs: {', '.join(sorted(own - saved))}")
    if saved - own:
        warn_user(f"{label}: ignored, not attached to this engine: {', '.join(sorted(saved - own))}")
