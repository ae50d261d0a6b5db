"""The state of a scheduled model, by the reference model's names, shapes and layout."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.errors import ReplicaError, WeightsError, warn_user
from slapo_runtime.correspondence import Correspondence
from slapo_runtime.correspondence.reference import TensorSpec
from slapo_runtime.correspondence.storage import InPlace, LiveTensor, is_distributed
from slapo_runtime.ranks.exchange import exchange_device
from slapo_runtime.ranks.world import gather_along, together
from slapo_runtime.replicas import DIVERGED, DIVERGED_LIVE, compare_all
from slapo_runtime.weights.checkpoint_source import open_source
from slapo_runtime.weights.files import warn_of_other_function
from slapo_runtime.weights.loading import load_checkpoint
from slapo_runtime.weights.module_state import chosen, extra_states, follow_buffers, is_extra, set_extra_states
from slapo_runtime.weights.saving import PendingSave, Saving, save_checkpoint
from slapo_runtime.weights.sharded_checkpoint import load_shards, shards_of
from slapo_runtime.weights.sources import WeightsSource, check_names, read_tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from slapo_core import Schedule
    from slapo_core.layout import Mesh
    from slapo_runtime.correspondence.storage import OptimizerStorage, ShardedState, ShardSource, TensorStorage


_Copied = Callable[[torch.Tensor, torch.dtype], torch.Tensor]


@dataclass
class ModelState:
    """The state of a scheduled model, by the reference model's names, shapes and layout.

    On a mesh with several ranks, methods without an underscore are collectives: every rank calls them, in the same
    order.

    Args:
        correspondence: of live tensors to reference tensors.
        dropped: the values of reference tensors that steps dropped, by first name, on the CPU.
        uses_rng: whether a training step used torch's RNG.
        storage: of the tensors, by a runtime or the model.
        built: the types of the live tensors before a runtime converted them, by name.
        hint: for differing replicas.
        saving: the facts about checkpoints: steps, attached objects.
    """

    correspondence: Correspondence
    dropped: dict[str, torch.Tensor] = field(default_factory=dict)
    uses_rng: bool = False
    storage: TensorStorage = field(default_factory=InPlace)
    built: dict[str, torch.dtype] = field(default_factory=dict)
    hint: str = DIVERGED
    saving: Saving = field(default_factory=Saving)
    _has_warned: bool = False
    _trained: dict[str, torch.dtype] = field(default_factory=dict)

    @classmethod
    def of(cls, schedule: Schedule) -> ModelState:
        """Return the state of an unsealed schedule.

        Raises:
            SealedError: the originals were dropped.
            WeightsError: a tensor is unexplained, or a dropped one is on the meta device, without values.
        """
        correspondence, tensors = Correspondence.of(schedule)
        correspondence.check()
        state = cls(correspondence, hint=DIVERGED_LIVE)
        for spec in correspondence.dropped():
            if tensors[spec.name].is_meta:
                raise WeightsError(f"'{spec.name}' is on the meta device, without values for a state dict")
            state.dropped[spec.name] = tensors[spec.name].detach().to("cpu", copy=True)
        return state

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of the schedule; None without one."""
        return self.correspondence.mesh

    def tensors(self) -> tuple[LiveTensor, ...]:
        """Return every live parameter and buffer once, in registration order."""
        return self.correspondence.live()

    def sharded_axes(self, *, partitioned: bool = False) -> dict[int, list[int]]:
        """Return the sharded axes of tensors by identity; ``partitioned`` adds all axes of parameters."""
        found: dict[int, list[int]] = {}
        for live in self.tensors():
            if partitioned and live.is_parameter and live.is_local:
                found[id(live.tensor)] = list(range(live.tensor.dim()))
            for mesh_dim, axis in live.layout.shards():
                if self.mesh is not None and self.mesh.size(mesh_dim) > 1:
                    found.setdefault(id(live.tensor), []).append(axis)
        return found

    def keep_in(self, storage: TensorStorage) -> None:
        """Use a runtime's storage of tensors; called by a dialect during the build.

        Tensors that it partitions over replicas are not compared along ``dp``, only along the other dimensions.
        """
        self.storage, self._trained = storage, {}

    @property
    def kept(self) -> TensorStorage | None:
        """The runtime's storage of tensors; None if the model holds them itself."""
        return None if isinstance(self.storage, InPlace) else self.storage

    def check_replicas(
        self, *, optimizer: torch.optim.Optimizer | OptimizerStorage | None = None, repair: bool = False
    ) -> None:
        """Compare replicas bit for bit: a collective over the mesh.

        It compares parameters, buffers except for running statistics, the state and settings of an optimizer, and, if
        training steps use the RNG, torch's RNG state over ``tp``; main copies of a runtime as well as the forward's.

        Args:
            optimizer: over the model's parameters.
            repair: give every rank the values of the first one with a replica, with a warning about the differences,
                instead of an error.

        Raises:
            RankMismatchError: on every rank, with the tensors, the ranks and their values; also for parameters that do
                not match their main copies.
        """
        if self.correspondence.placement is not None:
            follow_buffers(self.correspondence)
            with together(self.mesh, "checking the values of this rank's tensors"):
                self._refuse_without_values()
        compare_all(
            self.correspondence, optimizer, storage=self.kept, random=self.uses_rng, repair=repair, hint=self.hint
        )

    def state_dict(self, *, rank0_only: bool = False, include_added: bool = False) -> dict[str, Any]:
        """Return the reference model's state dict, as copies on the CPU.

        It includes the modules' extra state (``get_extra_state``), as in torch, which may have any type.

        Args:
            rank0_only: other ranks take part but return an empty dictionary.
            include_added: include tensors that steps added, under their own names; else a warning names them once.

        Raises:
            RankMismatchError: replicas of a tensor differ. They are compared if gathering takes all ranks anyway, and
                with ``rank0_only``.
        """
        self.check_unchanged()
        differing = self.differing() if rank0_only or self.is_spread else None  # else a single rank may call it
        values = self.full_state(rank0_only=rank0_only, include_added=include_added)
        extra = extra_states(self.correspondence, compare=rank0_only or self.is_spread)
        if extra and (not rank0_only or self.is_first_rank):
            values |= extra
            order = self.correspondence.survey.order
            values = {key: values[key] for key in order if key in values} | values
        if differing is not None:
            differing.state_dict = values
            raise differing
        return values

    def differing(self, optimizer: torch.optim.Optimizer | OptimizerStorage | None = None) -> ReplicaError | None:
        """Return the error of :meth:`check_replicas`; only warn of differences within rounding."""
        try:
            self.check_replicas(optimizer=optimizer)
        except ReplicaError as error:
            if not error.within_rounding:
                return error
            warn_user(
                f"{error.message}\nthe differences are within rounding, so this is not an error",
            )
        return None

    def load_state_dict(self, state: Mapping[str, torch.Tensor] | WeightsSource | str | os.PathLike[str]) -> None:
        """Load a :meth:`state_dict`, or a directory of safetensors, into the live tensors: each rank its own shards.

        Raises:
            WeightsError: missing or unexpected names, or wrong shapes; nothing was changed.
        """
        self.check_unchanged()
        with together(self.mesh, "reading the state dict"):
            self._refuse_without_values()
            loading = self.prepare(open_source(state))
        loading.assign()

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        optimizer: torch.optim.Optimizer | OptimizerStorage | None = None,
        runtime: Mapping[str, Any] | None = None,
        keep: int | None = None,
        asynchronous: bool = False,
    ) -> PendingSave | None:
        """Save weights and optimizer state, for any schedule and target of the same model.

        Args:
            directory: of the checkpoints of all steps; made if it does not exist.
            optimizer: over the model's parameters.
            runtime: the further state of the runtime, as JSON, by name: ``{"lr_scheduler": {...}}``; under
                ``"counters"`` informative values, e.g. the number of steps.
            keep: the number of checkpoints to keep; None keeps all.
            asynchronous: return once the values are copied.

        Returns:
            the pending save; None where it is over.

        Raises:
            ReplicaError: as for :meth:`check_replicas`; the written checkpoint is complete, with the first rank's
                values.
            BuildError: the state of the optimizer or ``runtime`` cannot be saved, or writing failed.
        """
        self.check_unchanged()
        return save_checkpoint(directory, self, optimizer, runtime or {}, keep=keep, asynchronous=asynchronous)

    def load(
        self,
        directory: str | os.PathLike[str],
        *,
        optimizer: torch.optim.Optimizer | OptimizerStorage | None = None,
        uses: Collection[str] = (),
    ) -> dict[str, Any]:
        """Load a checkpoint of :meth:`save`.

        Args:
            directory: of the checkpoint.
            optimizer: over the model's parameters.
            uses: the names in ``runtime`` that the caller loads; a warning names the others of the checkpoint, except
                ``"counters"``.

        Returns:
            the ``runtime`` of the checkpoint, ``{}`` without one.

        Raises:
            WeightsError: no complete checkpoint, or of another model; nothing was changed.
            BuildError: the state does not fit this optimizer; nothing was changed.
        """
        return load_checkpoint(directory, self, optimizer, uses)

    def shards(
        self,
        *,
        optimizer: torch.optim.Optimizer | OptimizerStorage | None = None,
        runtime: Mapping[str, Any] | None = None,
    ) -> ShardedState:
        """Return this rank's shards of a checkpoint, for a runtime with its own files.

        Args:
            optimizer: over the model's parameters.
            runtime: as for :meth:`save`.

        Raises:
            RankMismatchError: as for :meth:`check_replicas`.
            BuildError: the state of the optimizer or ``runtime`` cannot be saved.
        """
        self.check_unchanged()
        return shards_of(self, optimizer, runtime or {})

    def load_shards(
        self,
        description: Mapping[str, Any],
        source: ShardSource,
        *,
        optimizer: torch.optim.Optimizer | OptimizerStorage | None = None,
        uses: Collection[str] = (),
    ) -> dict[str, Any]:
        """Load :meth:`shards` with their description.

        ``source`` is read once, for all shards of this rank. Arguments, result and errors are as for :meth:`load`.
        """
        return load_shards(self, description, source, optimizer, uses)

    def export(
        self,
        directory: str | os.PathLike[str],
        *,
        max_shard_size: int | str = "5GB",
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write the weights as safetensors; see :meth:`slapo_runtime.engine.StatefulEngine.export`."""
        from slapo_runtime.weights.export import export

        self._learn_types()
        export(self, directory, max_shard_size=max_shard_size, dtype=dtype)

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank is the first rank of the model."""
        if self.mesh is not None:
            return self.mesh.is_first_rank
        mesh = self.own_mesh
        return mesh is None or mesh.get_rank() == int(mesh.mesh.min())

    @property
    def own_mesh(self) -> DeviceMesh | None:
        """The mesh of the model's DTensors, if the schedule has none."""
        meshes: Any = (live.tensor.device_mesh for live in self.tensors() if is_distributed(live.tensor))  # type: ignore[attr-defined]
        return next(meshes, None) if self.mesh is None else None

    @property
    def is_spread(self) -> bool:
        """Whether gathering some tensor needs other ranks."""
        if self.correspondence.is_spread:
            return True
        return any(live.is_local and self.storage.partitioned(live) for live in self.tensors())

    # -- inside -----------------------------------------------------------------------------------------------

    def check_unchanged(self) -> None:
        """Refuse a model changed outside of the schedule, and update buffers: a collective."""
        self.correspondence.tree.tensors.check_unchanged()
        follow_buffers(self.correspondence)

    def _refuse_without_values(self) -> None:
        empty = [live.name for live in self.tensors() if live.is_local and live.tensor.is_meta]
        if empty:
            raise WeightsError(
                f"'{empty[0]}' is on the meta device, but this rank must hold its values"
                + (f" ({len(empty) - 1} more are, too)" if empty[1:] else ""),
                hint="slapo.build(sch, weights=state, optimizer=...) materializes a model on the meta device; in "
                'your own loop, first call sch.model.to_empty(device="cpu"), and fill in the non-persistent buffers',
            )

    def full_state(self, *, rank0_only: bool, include_added: bool, as_trained: bool = False) -> dict[str, torch.Tensor]:
        """Return :meth:`state_dict` without comparing replicas.

        Args:
            rank0_only: as there.
            include_added: as there.
            as_trained: in the trained precision, instead of the reference model's.
        """
        wanted = not rank0_only or self.is_first_rank
        specs = self.correspondence.survey.specs
        self._learn_types()

        def copied(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            return value.detach().to("cpu", value.dtype if as_trained else dtype, copy=True)

        full = self._carried(wanted, copied)
        for live, _ in self.correspondence.translated():
            value = self.full(live)
            if wanted:
                tensors = self.correspondence.translations.to_reference(live, value)
                for name, tensor in tensors.items():
                    full[name] = copied(tensor, self._own_type(tensor, specs[name].dtype)).contiguous()
        added = self._added(wanted, include_added, copied)
        if not wanted:
            return {}
        full.update((name, tensor.clone()) for name, tensor in self.dropped.items())
        return {key: full[origin] for key, origin in self.correspondence.survey.keys.items()} | added

    def _own_type(self, value: torch.Tensor, built: torch.dtype) -> torch.dtype:
        """Return the reference model's type if a runtime stores the tensor, else the tensor's."""
        return built if self.kept is not None else value.dtype

    def prepare(self, source: WeightsSource) -> Loading:
        """Compare a source with the model, and read this rank's shards.

        Raises:
            WeightsError: names or shapes do not fit.
        """
        names = check_names(self.correspondence.survey, source)
        loading = Loading(self, extra=chosen(self.correspondence, source.extra, source.label))
        for live, specs in self.correspondence.translated():
            if live.is_local:
                loading.take(live, self.read_translated(source, names, live, specs))
        for live, spec in self.correspondence.carried():
            if spec.keys and live.is_local:
                loading.take(live, source.read(names[spec.name], live.layout, self.mesh))
        for name in self.dropped:
            loading.dropped[name] = read_tensor(source, names[name], self.correspondence.survey.specs[name])
        return loading

    def read_translated(
        self, source: WeightsSource, names: Mapping[str, str], live: LiveTensor, specs: tuple[TensorSpec, ...]
    ) -> torch.Tensor:
        """Read this rank's shard of a translated live tensor from a source."""
        tensors = {
            spec.name: read_tensor(source, names[spec.name], spec, wider=self.kept is not None) for spec in specs
        }
        return live.layout.local(self.correspondence.translations.from_reference(live, tensors), self.mesh)

    def _carried(self, wanted: bool, copied: _Copied) -> dict[str, torch.Tensor]:
        """Gather the reference tensors of live tensors with layouts."""
        carriers: dict[str, LiveTensor] = {}
        for live, spec in self.correspondence.carried():
            carriers.setdefault(spec.name, live)
        full = {}
        for spec in self.correspondence.survey.specs.values():
            holders = self.correspondence.holders_of(spec)
            carrier = carriers.get(spec.name)
            if not spec.keys or (carrier is None and not holders):
                continue
            if carrier is not None:
                value = self.full(carrier)
            else:
                value = self.full_elsewhere(spec.name)
            if wanted:
                full[spec.name] = copied(value, self._own_type(value, spec.dtype))
        return full

    def full(self, live: LiveTensor) -> torch.Tensor:
        """Gather the full value of a live tensor on every rank: a collective."""
        value = live.layout.full(self.storage.read(live), self.mesh) if live.is_local else None
        holders = self.correspondence.holders(live)
        return self.from_holders(value, tuple(live.layout.shape), self._type(live), holders)

    def full_elsewhere(self, name: str) -> torch.Tensor:
        """Gather a reference tensor without a live tensor on this rank: a collective over ``pp``."""
        spec = self.correspondence.survey.specs[name]
        dtype = self._trained.get(name, spec.dtype)
        return self.from_holders(None, spec.shape, dtype, self.correspondence.holders_of(spec))

    def _type(self, live: LiveTensor) -> torch.dtype:
        """Return a tensor's type on the ranks that hold it."""
        if self.kept is None:
            return live.tensor.dtype
        return self.storage.dtype(live) if live.is_local else self._trained.get(_key(live), live.tensor.dtype)

    def _learn_types(self) -> None:
        """Gather the trained types of the other pipeline ranks: a collective, once."""
        if self.kept is None or self.correspondence.placement is None or self._trained:
            return
        own = {_key(live): self.storage.dtype(live) for live in self.tensors() if live.is_local}
        assert self.mesh is not None
        for theirs in gather_along(self.mesh, "pp", own):
            self._trained.update(theirs)

    def from_holders(
        self,
        value: torch.Tensor | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        holders: Mapping[str, tuple[int, ...]],
    ) -> torch.Tensor:
        """Broadcast a tensor that only some ranks hold, from the first of them."""
        for mesh_dim, ranks in holders.items():
            group = self.mesh.group(mesh_dim) if self.mesh is not None else None
            if group is None or self.mesh is None:
                continue
            import torch.distributed as dist

            if value is None:
                value = torch.empty(shape, dtype=dtype, device=exchange_device(self.mesh))
            value = value.to(exchange_device(self.mesh)).contiguous()
            dist.broadcast(value, group_src=ranks[0], group=group)
        assert value is not None
        return value

    def _added(self, wanted: bool, include: bool, copied: _Copied) -> dict[str, torch.Tensor]:
        added = self.correspondence.added()
        if not include:
            other = [key for key in self.correspondence.survey.not_tensors if not is_extra(key)]
            left_out = [live.name for live in added] + other
            changed = self.correspondence.other_function
            if (left_out or changed) and not self._has_warned:
                self._has_warned = True
                warn_of_other_function(changed)
                if left_out:
                    warn_user(
                        "the state dict leaves out tensors that the reference model does not have: "
                        + ", ".join(left_out),
                    )
            return {}
        found = {}
        for live in added:
            value = self.full(live)
            if wanted:
                found[live.name] = copied(value, self._own_type(value, self.built.get(live.name, value.dtype)))
        return found


def _key(live: LiveTensor) -> str:
    return live.reference_names[0] if live.reference_names else f"added {live.name}"


@dataclass
class Loading:
    """Read values, to be assigned when every rank has its own.

    Args:
        state: to assign to.
        assignments: functions that assign this rank's shards.
        dropped: as in :class:`ModelState`.
        extra: for the modules' ``set_extra_state``.
    """

    state: ModelState
    assignments: list[Callable[[], None]] = field(default_factory=list)
    dropped: dict[str, torch.Tensor] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def take(self, live: LiveTensor, shard: torch.Tensor) -> None:
        """Add this rank's shard of a tensor."""
        self.assignments.append(self.state.storage.loading(live, shard))

    def assign(self) -> None:
        """Assign all values."""
        for assign in self.assignments:
            assign()
        self.state.dropped.update(self.dropped)
        set_extra_states(self.state.correspondence, self.extra)
