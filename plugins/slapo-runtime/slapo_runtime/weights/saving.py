"""Save checkpoints: every rank writes its own rectangles, in this process or in a worker process."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from slapo_core.errors import ArgumentError, BuildError, RankMismatchError, warn_user
from slapo_runtime.checkpoints.manifest import begin_step, newest_checkpoint, remove_checkpoint, step_of
from slapo_runtime.checkpoints.worker import Staged, Worker
from slapo_runtime.checkpoints.writer import Completion, RankFile
from slapo_runtime.ranks.consistency import torch_states
from slapo_runtime.ranks.world import World, together
from slapo_runtime.weights.checkpoint_contents import (
    as_written,
    collect_optimizer_state,
    packed_extra_states,
    refuse_not_json,
)
from slapo_runtime.weights.files import write_configurations, writing
from slapo_runtime.weights.sharded_checkpoint import OwnShard, description_of, own_shards

if TYPE_CHECKING:
    from slapo_core.layout import Mesh
    from slapo_runtime.correspondence.storage import OptimizerStorage
    from slapo_runtime.weights.state import ModelState

PARTS = {"weight": "model", "added": "added", "optimizer": "optimizer"}
"""Kind of a tensor -> the beginning of its name in a checkpoint."""


@runtime_checkable
class Stateful(Protocol):
    """An object that is saved and resumed with an engine, e.g. a sampler; its state is JSON, the same on every rank."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any) -> Any: ...


@dataclass
class Saving:
    """The facts about the checkpoints of one engine.

    Attributes:
        steps: the number of training steps, of the checkpoints that were loaded too.
        attached: objects that are saved and resumed too, by name.
        pending: the last asynchronous save, before a wait for it.
        worker: the process that writes asynchronous saves, once there was one.
    """

    steps: int = 0
    attached: dict[str, Stateful] = field(default_factory=dict)
    pending: PendingSave | None = None
    worker: Worker | None = None

    def attach(self, name: str, stateful: Stateful) -> None:
        """Save and resume an object too; see :meth:`slapo_runtime.engine.StatefulEngine.attach`."""
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"the name must be a string (got {name!r})", hint='engine.attach("sampler", sampler)')
        if not isinstance(stateful, Stateful):
            raise ArgumentError(
                f"'{name}' must have state_dict() and load_state_dict(state) (got {type(stateful).__name__})",
                hint='engine.attach("sampler", sampler)',
            )
        if name in self.attached:
            raise ArgumentError(f"'{name}' is attached already", hint=f'engine.attach("another {name}", ...)')
        self.attached[name] = stateful

    def wait(self) -> None:
        """Wait for the pending save: a collective."""
        pending, self.pending = self.pending, None
        if pending is not None and not pending.is_over:
            pending.wait()


class PendingSave:
    """An asynchronous save that goes on in worker processes.

    Args:
        mesh: of the ranks.
        directory: of the step.
        worker: of this rank.
        is_first: whether this rank completes the checkpoint.

    Attributes:
        is_over: whether :meth:`wait` was called.
    """

    def __init__(self, mesh: Mesh | None, directory: Path, worker: Worker, *, is_first: bool) -> None:
        self._mesh, self._directory, self._worker, self._is_first = mesh, directory, worker, is_first
        self._error: Exception | None = None
        self.is_over = False

    @property
    def done(self) -> bool:
        """Whether this rank's part is over: on the first rank, the entire checkpoint; not a collective."""
        return self.is_over or self._worker.is_idle

    def wait(self) -> None:
        """Wait until the checkpoint is complete: a collective.

        Raises:
            BuildError: a worker failed, on every rank; the checkpoint is incomplete, earlier ones are intact.
        """
        if not self.is_over:
            self.is_over = True
            try:
                self._wait()
            except Exception as error:
                self._error = error
                raise
        elif self._error is not None:
            raise self._error

    def _wait(self) -> None:
        what = f"writing the checkpoint '{self._directory}'"
        try:
            with World(self._mesh) as world:
                with world.together(what):
                    self._worker.result("written")
                with world.together(what):
                    if self._is_first:
                        self._worker.result("completed")
        except BaseException:
            if self._is_first:
                self._worker.abandon()
                remove_checkpoint(self._directory)
            raise


def save_checkpoint(
    directory: str | os.PathLike[str],
    state: ModelState,
    optimizer: torch.optim.Optimizer | OptimizerStorage | None,
    runtime: Mapping[str, Any],
    *,
    keep: int | None = None,
    asynchronous: bool = False,
) -> PendingSave | None:
    """Save weights and optimizer state: a collective; every rank writes.

    Raises:
        ReplicaError: replicas of a tensor or of the optimizer's state differ; the written checkpoint is complete,
            with the values of the first rank.
        RankMismatchError: parameters do not match the runtime's main copies; nothing was written.
        BuildError: the state of the optimizer or ``runtime`` cannot be saved, or writing failed; on every rank.
    """
    if not os.fspath(directory):
        raise ArgumentError("the directory of the checkpoints is empty", hint='engine.save("checkpoints")')
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ArgumentError(f"keep must be a positive number (got {keep!r})", hint="engine.save(directory, keep=3)")
    saving = state.saving
    saving.wait()
    differing = state.differing(optimizer)
    random = _random_states(state.mesh)
    with together(state.mesh, "saving the optimizer's state"):
        refuse_not_json(runtime)
    attached = _attached_states(saving, state.mesh)
    extra = packed_extra_states(state)
    moments = collect_optimizer_state(state, optimizer)
    if moments is not None:
        moments.merge()
    description = {**description_of(state, moments, extra, runtime), "attached": attached}
    if differing is not None:
        description["replicas"] = differing.message
    with World(state.mesh) as world:
        save = _Save(Path(directory), world, is_first=state.is_first_rank, steps=saving.steps)
        save.begin(state)
        completion = Completion(save.directory, save.identifier, saving.steps, world.size, description, random, keep)
        shards = own_shards(state, moments)
        if asynchronous and save.takes_part:
            saving.worker = saving.worker or Worker()
            saving.pending = save.stage(shards, completion, saving.worker, state.mesh)
        else:
            save.write(shards, completion)
    if differing is not None:
        saving.wait()
        raise as_written(differing, save.root) from differing
    return saving.pending


class _Save:
    """One save: the steps that all ranks make together.

    Args:
        root: the directory of all steps.
        world: the ranks.
        is_first: whether this rank makes and completes the directory.
        steps: the number of training steps.

    Attributes:
        directory: of this step.
        identifier: of this save.
    """

    def __init__(self, root: Path, world: World, *, is_first: bool, steps: int) -> None:
        self.root, self._world, self._is_first, self._steps = root, world, is_first, steps
        self._what = f"writing the checkpoint '{root}'"
        self.directory, self.identifier = root, uuid.uuid4().hex

    def begin(self, state: ModelState) -> None:
        """Make the directory of the step, with the model's configurations."""
        with self._world.together(self._what):
            if self._is_first:
                with writing(self.root):
                    newest = newest_checkpoint(self.root)
                    self.directory = begin_step(self.root, self._steps)
                    write_configurations(state.correspondence.tree.root, self.directory)
                if newest is not None and step_of(newest) > self._steps:  # type: ignore[operator]
                    warn_user(
                        f"'{newest}' is of a later step than this one ({self._steps}), of another training: "
                        "engine.load takes the later one; save into another directory, or remove it",
                    )
        self.directory, self.identifier = self._world.gather((self.directory, self.identifier))[0]

    def write(self, shards: Iterator[OwnShard], completion: Completion) -> None:
        """Write all rectangles in this process, one after the other, and complete the checkpoint."""
        error: Exception | None = None
        if not self.takes_part:
            for _ in shards:
                continue
            return
        with contextlib.ExitStack() as stack:
            file = RankFile(self.directory, self._world.index, self.identifier)
            try:
                stack.enter_context(file)
            except OSError as caught:
                error = caught
            for shard in shards:  # to the end, also after an error: other ranks wait for this one's collectives
                if error is None:
                    try:
                        file.add(name_of(shard), shard.shape, shard.offset, shard.read())
                    except Exception as caught:  # noqa: BLE001 - raised on every rank below
                        error = caught
            try:
                if error is None:
                    file.finish()
            except OSError as caught:
                error = caught
        with self._removed_if_it_fails():
            with self._world.together(self._what), writing(self.root):
                if error is not None:
                    raise error
            with self._world.together(self._what), writing(self.root):
                if self._is_first:
                    completion.run()

    def stage(
        self, shards: Iterator[OwnShard], completion: Completion, worker: Worker, mesh: Mesh | None
    ) -> PendingSave:
        """Copy all rectangles for the worker process, and let it write them."""
        staged = Staged(self.directory, self._world.index, self.identifier, completion if self._is_first else None)
        error: Exception | None = None
        for shard in shards:  # to the end, as above
            if error is None:
                try:
                    worker.stage(staged, name_of(shard), shard.shape, shard.offset, shard.read())
                except Exception as caught:  # noqa: BLE001 - raised on every rank below
                    error = caught
        with self._removed_if_it_fails(), self._world.together(self._what), writing(self.root):
            if error is not None:
                raise error
        with self._removed_if_it_fails(), self._world.together(self._what), writing(self.root):
            worker.start(staged)
        return PendingSave(mesh, self.directory, worker, is_first=self._is_first)

    @property
    def takes_part(self) -> bool:
        """Whether this rank writes: of a schedule without a mesh, the first rank of the DTensors alone."""
        return self._is_first or not self._world.is_alone

    @contextlib.contextmanager
    def _removed_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self._is_first:
                remove_checkpoint(self.directory)
            raise


def name_of(shard: OwnShard) -> str:
    """Return the name of a rectangle's tensor in a checkpoint, e.g. ``"model.fc1.weight"``."""
    return f"{PARTS[shard.kind]}.{shard.name}"


def _attached_states(saving: Saving, mesh: Mesh | None) -> dict[str, Any]:
    """Return the states of attached objects, which are the same on every rank: a collective."""
    states: dict[str, Any] = {}
    with World(mesh) as world:
        with world.together("saving the attached objects"):
            for name, one in saving.attached.items():
                states[name] = one.state_dict()
                try:
                    states[name] = json.loads(json.dumps(states[name], allow_nan=False))
                except (TypeError, ValueError) as error:
                    raise BuildError(
                        f"the state of '{name}' must be JSON-serializable: {error}",
                        hint="its state_dict() must hold numbers, strings, lists and dictionaries",
                    ) from error
        by_rank = dict(zip(world.ranks, world.gather(states), strict=True))
    first, *others = by_rank.items()
    for rank, theirs in others:
        for name in sorted({*states, *theirs}):
            if theirs.get(name) != first[1].get(name):
                raise RankMismatchError(
                    f"the state of '{name}' differs between ranks: rank {first[0]} has {first[1].get(name)}, rank "
                    f"{rank} has {theirs.get(name)}",
                    hint="attach the same objects on every rank, with one state for all ranks",
                )
    return states


def replica_of(mesh: Mesh | None) -> str:
    """Return the number of this rank's replica, for the states of generators."""
    if mesh is None:
        return "0"
    return str(mesh.rank("dp_replicate") * mesh.size("dp") + mesh.rank("dp"))


def _random_states(mesh: Mesh | None) -> dict[str, dict[str, str]]:
    """Gather the RNG states of each replica's first rank: a collective."""
    own = {device: base64.b64encode(content).decode() for device, content in torch_states().items()}
    by_replica: dict[str, dict[str, str]] = {}
    for replica, states in World(mesh).gather_once((replica_of(mesh), own)):
        by_replica.setdefault(replica, states)
    return by_replica
