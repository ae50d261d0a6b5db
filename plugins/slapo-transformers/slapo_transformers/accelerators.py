"""accelerate for scheduled models: its processes are replicas; norms and states are of the full model."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import recursively_apply
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

import slapo_core as slapo
from slapo_core import ArgumentError, Mesh, MeshError, Schedule
from slapo_runtime.state import gather_full_matrices
from slapo_torch.grad_scaler import MeshGradScaler
from slapo_transformers.optimizer_files import named, numbered


def prepare(accelerator: Accelerator, sch: Schedule, optimizer: torch.optim.Optimizer, *others: Any) -> tuple[Any, ...]:
    """Prepare a scheduled model for a loop of accelerate, in place of ``accelerator.prepare``.

    The loop stays as it is. ``accelerator.clip_grad_norm_`` clips by the norm of the full model, whatever parameters
    it is given; ``gather`` and ``reduce`` count each replica once; ``save_state`` and ``load_state`` hold the full
    model and its optimizer, and are collectives. Call it on every rank, after the last step and after
    :func:`slapo_core.fully_shard`.

    Args:
        accelerator: without a plugin for DeepSpeed, Megatron, FSDP or torch.compile.
        sch: the schedule.
        optimizer: over the model's parameters.
        others: data loaders, which give each replica its own batches, and learning-rate schedulers.

    Returns:
        the model, in DistributedDataParallel over several replicas; the optimizer; and the others.

    Raises:
        ArgumentError: not a schedule, or an accelerator with a plugin.
        MeshError: an abstract mesh, a mesh of another size than the launch, or pipeline stages.
    """
    attach(accelerator, sch)
    return tuple(accelerator.prepare(sch.model, optimizer, *others))


def attach(accelerator: Accelerator, sch: Schedule) -> None:
    """Make the processes of an accelerator the replicas of a schedule; arguments as of :func:`prepare`."""
    check_schedule(sch, accelerator.state.num_processes)
    state = accelerator.state
    kind = str(state.distributed_type.value)
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU") or state.dynamo_plugin.backend.value != "NO":
        plugin = "torch.compile" if kind in ("NO", "MULTI_CPU", "MULTI_GPU") else kind
        raise ArgumentError(
            f"the accelerator is set up for {plugin}, which would change the scheduled model",
            hint="Accelerator() without a plugin; compile by sch[...].compile(), shard by slapo.fully_shard(sch)",
        )
    if accelerator.dispatch_batches:
        raise ArgumentError(
            "dispatch_batches=True sends each rank its own samples, but the ranks of a replica take the same ones",
            hint="leave dispatch_batches out, or False; in a Trainer accelerator_config={'dispatch_batches': False}",
        )
    accelerator.dataloader_config.dispatch_batches = False  # None: True for an IterableDataset
    if not isinstance(accelerator, ScheduledAccelerator):
        own = type(accelerator)
        accelerator.__class__ = type(f"Scheduled{own.__name__}", (ScheduledAccelerator, own), {})
        accelerator.register_load_state_pre_hook(_load_weights_of(accelerator))
    accelerator.schedule = sch  # type: ignore[attr-defined]
    if not isinstance(accelerator.scaler, MeshGradScaler | None):  # an overflow on one rank skips the step on all
        scaler = MeshGradScaler(accelerator.device, sch.mesh)
        scaler.load_state_dict(accelerator.scaler.state_dict())
        accelerator.scaler = scaler


def check_schedule(sch: Any, world_size: int | None) -> None:
    """Refuse what no loop of a host trains.

    Args:
        sch: the schedule.
        world_size: of the launch; None if it is not known yet.
    """
    if not isinstance(sch, Schedule):
        raise ArgumentError(
            f"schedule must be a schedule (got {type(sch).__name__})",
            hint="sch = slapo.create_schedule(model, mesh={'tp': 2})",
        )
    mesh = sch.mesh
    if mesh is None:
        return
    for mesh_dim in ("pp", "cp", "ep"):
        if mesh.size(mesh_dim) > 1:
            raise MeshError(
                f"the mesh {mesh} has {mesh.size(mesh_dim)} ranks along '{mesh_dim}', which a loop of transformers or "
                "accelerate does not run",
                hint="slapo.build(sch, optimizer=...) trains pipeline stages; here: 'dp_replicate', 'dp' and 'tp'",
            )
    if mesh.is_abstract:
        raise MeshError(f"the mesh {mesh} is abstract: no processes train this model", hint=mesh.launch_hint())
    if world_size is not None and mesh.world_size != world_size:
        raise MeshError(
            f"the mesh {mesh} has world size {mesh.world_size}, but the launch has world size {world_size}",
            hint=mesh.launch_command(),
        )
    if mesh.size("dp_replicate") > 1 and not isinstance(sch.model, FSDPModule):
        raise MeshError(
            f"the mesh {mesh} has several ranks along 'dp_replicate' without fully_shard",
            hint="slapo.fully_shard(sch) before; or one dimension 'dp' of all replicas",
        )


def replica_count(mesh: Mesh | None, world_size: int) -> int:
    """Return the number of replicas; without a mesh, each process is one."""
    return world_size if mesh is None else mesh.size("dp_replicate") * mesh.size("dp")


def replica_rank(mesh: Mesh | None, rank: int) -> int:
    """Return the place of this rank's replica among them."""
    return rank if mesh is None else mesh.rank("dp_replicate") * mesh.size("dp") + mesh.rank("dp")


class ScheduledAccelerator(Accelerator):
    """An accelerator whose processes are the replicas of a scheduled model; made by :func:`attach`."""

    schedule: Schedule

    @property
    def num_processes(self) -> int:
        return replica_count(self.schedule.mesh, self.state.num_processes)

    @property
    def process_index(self) -> int:
        return replica_rank(self.schedule.mesh, self.state.process_index)

    @property
    def _shared(self) -> int:
        """The ranks of a replica."""
        return int(self.state.num_processes // self.num_processes)

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        model = super().prepare_model(model, device_placement, evaluation_mode=True)  # never a wrapper over all ranks
        if evaluation_mode or self.num_processes == 1 or isinstance(model, FSDPModule | DistributedDataParallel):
            return model
        mesh, handler = self.schedule.mesh, self.ddp_handler
        wrapped = DistributedDataParallel(
            model,
            device_ids=None if self.device.type == "cpu" else [self.device],
            process_group=mesh.group("dp") if mesh is not None else None,
            **(handler.to_kwargs() if handler is not None else {}),
        )
        held: list[Any] = self._models
        held[:] = [wrapped if one is model else one for one in held]
        return wrapped

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        if not getattr(optimizer, "_is_accelerate_prepared", False):
            gather_full_matrices(self.schedule, optimizer)
        prepared = super().prepare_optimizer(optimizer, False)  # else it reads and loads the state of shards
        prepared.__class__ = ScheduledOptimizer
        prepared.schedule = self.schedule
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        prepared = super().prepare_scheduler(scheduler)
        if not prepared.split_batches:
            prepared.__class__, prepared.steps, prepared.split_batches = ScheduledScheduler, self.num_processes, True
        return prepared

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        if not isinstance(model, FSDPModule):
            with super().no_sync(model):
                yield
            return
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        self.unscale_gradients()
        return slapo.clip_grad_norm_(self.schedule, max_norm, norm_type)

    def gather(self, tensor: Any) -> Any:
        found = super().gather(tensor)
        return found if self._shared == 1 else recursively_apply(self._one_of_each_replica, found)

    def _one_of_each_replica(self, gathered: torch.Tensor) -> torch.Tensor:
        by_rank = gathered.view(self.state.num_processes, -1, *gathered.shape[1:])
        return by_rank[self._first_ranks()].flatten(0, 1)

    def _first_ranks(self) -> list[int]:
        """Return the first rank of each replica, in their order."""
        mesh: Any = self.schedule.mesh
        order = sorted(mesh.sizes, key=lambda dim: (dim != "dp_replicate", dim != "dp"))
        ranks = mesh.device_mesh.mesh.permute([list(mesh.sizes).index(dim) for dim in order])
        return ranks.reshape(self.num_processes, -1)[:, 0].tolist()  # type: ignore[no-any-return]

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        if self._shared > 1 and (use_gather_object or not _holds_tensors(input_data)):
            is_first = self.state.process_index in self._first_ranks()
            return super().gather_for_metrics(input_data if is_first else [], use_gather_object=True)
        return super().gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        found = super().reduce(tensor, reduction, scale)
        if reduction != "sum" or self._shared == 1:
            return found
        return recursively_apply(lambda one: (one / self._shared).to(one.dtype), found)

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        return OrderedDict(slapo.state_dict(self.schedule, rank0_only=True))  # whose ties accelerate writes once


def _holds_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda one: one, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _load_weights_of(accelerator: Any) -> Any:
    def load(models: list[torch.nn.Module], directory: str) -> None:
        slapo.load_state_dict(accelerator.schedule, directory)
        models.clear()  # accelerate loads those that a hook leaves

    return load


class ScheduledOptimizer(AcceleratedOptimizer):
    """An optimizer whose state is that of the reference model, in torch's own form: a collective."""

    schedule: Schedule

    def state_dict(self) -> dict[str, Any]:
        return numbered(slapo.optimizer_state_dict(self.schedule, self.optimizer, rank0_only=True))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        slapo.load_optimizer_state_dict(self.schedule, self.optimizer, named(state_dict, self.schedule, self.optimizer))


class ScheduledScheduler(AcceleratedScheduler):
    """A scheduler that steps as often as there are replicas, as accelerate does for each process."""

    steps: int

    def step(self, *args: Any, **kwargs: Any) -> None:
        end = getattr(self.scheduler, "total_steps", torch.inf)  # of OneCycleLR, which raises after it
        for _ in range(self.steps if self.gradient_state.sync_gradients else 1):
            if self.scheduler._step_count <= end:
                super().step(*args, **kwargs)
