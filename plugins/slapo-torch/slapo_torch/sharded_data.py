"""Fully sharded data parallelism: parameters, gradients and optimizer state in shards over replicas."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from slapo_core import ArgumentError, BuildError, MeshError, Schedule, SealedError
from slapo_runtime.correspondence.storage import sharded_over
from slapo_runtime.guards.stale_optimizers import EXCHANGED
from slapo_runtime.state import live_state
from slapo_torch.data_options import check_shards, data_ranks
from slapo_torch.fully_shard import FullyShard, called_paths, units_of, units_of_stages
from slapo_torch.precision import with_islands
from slapo_torch.private import begin, reduce_accumulated

if TYPE_CHECKING:
    from slapo_core import Mesh
    from slapo_torch.precision import ModelPrecision


Policy = Callable[[str], fsdp.MixedPrecisionPolicy]


def fully_shard(sch: Schedule, *, reshard_after_forward: bool | int | None = None) -> None:
    """Shard the parameters of a scheduled model over its replicas, for a training loop of your own.

    In place of torch's ``fully_shard``, module by module: the units are those that steps marked, else the repeated
    blocks, and the root. Call it on every rank, after the last step and before the optimizer is made; it seals the
    schedule. :func:`slapo_core.clip_grad_norm_`, ``state_dict``, ``optimizer_state_dict`` and ``save_pretrained`` know
    the shards; ``sch.model.set_requires_gradient_sync(False)`` accumulates gradients without exchange.

    Args:
        sch: the schedule; its mesh has several ranks along ``dp``, and perhaps along ``dp_replicate``.
        reshard_after_forward: of units whose step says nothing else; see
            :class:`slapo_torch.fully_shard.FullyShard`.

    Raises:
        ArgumentError: not a schedule.
        MeshError: the mesh has no processes, or one rank along ``dp``.
        SealedError: the schedule was built or sealed.
        BuildError: ``fully_shard`` does not train a parameter, e.g. a scalar.

    Example:
        ::

            sch["model.layers.*"].fully_shard()
            slapo.fully_shard(sch)
            optimizer = torch.optim.AdamW(sch.model.parameters(), lr=1e-4)
    """
    if not isinstance(sch, Schedule):
        raise ArgumentError(
            f"fully_shard takes the schedule (got {type(sch).__name__})",
            hint="sch = slapo.create_schedule(model, mesh={'dp': 2}); slapo.fully_shard(sch)",
        )
    if sch.is_sealed:
        raise SealedError(
            "cannot call fully_shard: the schedule was built or sealed",
            hint='call it once, before build() or seal(); a built model: build(sch, data_parallel="fsdp")',
        )
    if data_ranks(sch.mesh) == 1:
        raise MeshError(
            f"fully_shard needs a mesh with several ranks along 'dp' (got {sch.mesh or 'no mesh'})",
            hint="create_schedule(model, mesh={'dp': 2})",
        )
    assert sch.mesh is not None
    sch.mesh.group("dp")  # raises if the mesh is abstract
    state = live_state(sch, "fully_shard")
    options = {"reshard_after_forward": reshard_after_forward}
    check_shards(sch, options)
    units = units_of(sch, reshard_after_forward=reshard_after_forward)
    before = dict(sch.model.named_parameters())
    ShardedData(
        sch.model, units, mesh_of_shards(sch.mesh), root=FullyShard(False if reshard_after_forward is False else None)
    )
    EXCHANGED.note_distributed(sch.model, before)
    state.tensors()  # shards take over the layouts of the parameters in whose place they are
    sch.seal("slapo_core.fully_shard")


def mesh_of_shards(mesh: Mesh | None, device: torch.device | None = None) -> DeviceMesh:
    """Return torch's mesh of the ranks that share parameters: ``dp``, or ``dp_replicate`` x ``dp`` (HSDP).

    Args:
        mesh: of the schedule.
        device: of the model, for a mesh of this rank alone.
    """
    if data_ranks(mesh) == 1:
        kind = device.type if device is not None else "cpu"
        if not dist.is_initialized():
            backend = "gloo" if kind == "cpu" else dist.get_default_backend_for_device(kind)
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            atexit.register(_end_process_group)
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return DeviceMesh.from_group(alone, kind, mesh_dim_names=("dp",))
    assert mesh is not None
    device_mesh: Any = mesh.device_mesh
    return device_mesh["dp_replicate", "dp"] if mesh.size("dp_replicate") > 1 else device_mesh["dp"]  # type: ignore[no-any-return]


Fill = Callable[[nn.Module], None]


def _end_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class ShardedModel:
    """A model whose units are under torch's ``fully_shard``.

    Args:
        model: parameters of units become DTensors in its place.
        units: the options of each, by path.
        mesh: of the ranks that share parameters.
        policy: the MixedPrecisionPolicy of the unit at a path; None for the default of torch.
        fill: is called with each unit before it is sharded; None: all parameters have their values.
        root: a module above the model, whose unit holds the other parameters; None: the model is a unit itself.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Mapping[str, FullyShard],
        mesh: DeviceMesh,
        *,
        policy: Policy | None = None,
        fill: Fill | None = None,
        root: nn.Module | None = None,
    ) -> None:
        types_of = policy or (lambda path: fsdp.MixedPrecisionPolicy())
        full = [parameter for _, parameter in model.named_parameters(remove_duplicate=False)]
        for path in sorted(units, key=lambda path: -path.count(".") - bool(path)):  # inner ones first, the root last
            if fill is not None:
                fill(model.get_submodule(path))
            _shard(model.get_submodule(path), mesh, units[path], types_of(path))
        if root is not None:
            _shard(root, mesh, FullyShard(False), types_of(""))
        above = model if root is None else root
        self._units: list[Any] = [module for module in above.modules() if isinstance(module, FSDPModule)]
        for unit in self._units:
            unit.set_force_sum_reduction_for_comms(True)  # gloo of some torch sums where it is to average
        shards = [parameter for _, parameter in model.named_parameters(remove_duplicate=False)]
        self._shard_of = {id(parameter): (parameter, shard) for parameter, shard in zip(full, shards, strict=True)}

    def take_over(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Give an optimizer of the full parameters the shards; what kept the full ones is forgotten."""
        for settings in optimizer.param_groups if optimizer is not None else ():
            settings["params"] = [self._shard_of[id(parameter)][1] for parameter in settings["params"]]
        self._shard_of = {}


class ShardedData(ShardedModel):
    """A model under torch's ``fully_shard``, and its training steps.

    Args:
        model: its parameters become DTensors in its place.
        units: the options of each unit but the root, by path.
        mesh: of the ranks that share parameters.
        root: the options of the root.
        policy: as for :class:`ShardedModel`.
        fill: as for :class:`ShardedModel`.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Mapping[str, FullyShard],
        mesh: DeviceMesh,
        *,
        root: FullyShard,
        policy: Policy | None = None,
        fill: Fill | None = None,
    ) -> None:
        self._model, self._name = model, type(model).__name__  # fully_shard puts a class of its own before it
        self._has_failed = False
        super().__init__(model, {**units, "": units.get("", root)}, mesh, policy=policy, fill=fill)
        model.register_forward_pre_hook(_reshard_first, prepend=True)  # before that of fully_shard

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate full gradients, without reducing them."""
        self._root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._root.set_requires_gradient_sync(True)

    @property
    def _root(self) -> FSDPModule:
        assert isinstance(self._model, FSDPModule)
        return self._model

    @contextlib.contextmanager
    def passes(self) -> Iterator[None]:
        """Free what passes of the model gathered, also where one fails midway."""
        try:
            yield
        except BaseException:
            if self.recovers:
                self._root.reset_iter_state()
            self._has_failed = True
            raise
        self.reshard()

    @property
    def recovers(self) -> bool:
        """Whether steps can go on after one that failed midway: from torch 2.13."""
        return hasattr(self._model, "reset_iter_state")

    def forget_gradients(self) -> None:
        """Drop what the micro-batches of a step that failed left in full gradients: a collective after such a step."""
        for group in self._units if self._has_failed else ():
            group.unshard()
            for parameter in _parameters(group):
                if not sharded_over(parameter):
                    parameter.grad = None
            group.reshard()
        self._has_failed = False

    def reshard(self) -> None:
        """Free all full parameters."""
        for group in self._units:
            group.reshard()

    def refuse_unseen_backward(self) -> None:
        """Refuse to step where ``fully_shard`` did not see the backward, and reduced no gradients.

        Raises:
            BuildError: it found no tensors in the model's output.
        """
        if not all(map(sharded_over, _parameters(self._model))):
            raise BuildError(
                f"fully_shard did not see the backward: it found no tensors in the output of {self._name}",
                hint="return tensors, or tuples, dictionaries or dataclasses of them; or register the output's class: "
                "torch.utils._pytree.register_pytree_node",
            )


def _reshard_first(module: Any, _: Any) -> None:
    """Free full parameters of the root that a forward without a backward has left: a step did not reach them."""
    module.reshard()


def _parameters(module: Any) -> Iterable[nn.Parameter]:
    found: Iterable[nn.Parameter] = module.parameters()
    return found


def _shard(module: nn.Module, mesh: DeviceMesh, unit: FullyShard, types: fsdp.MixedPrecisionPolicy) -> None:
    offload = fsdp.CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if unit.offload else fsdp.OffloadPolicy()
    elsewhere = {parameter for parameter in module.parameters() if parameter.is_meta}
    fsdp.fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=unit.reshard_after_forward,
        mp_policy=types,
        offload_policy=offload,
        ignored_params=elsewhere,
    )


class _Root(nn.Module):
    """The root of a rank's units, in place of a model whose forward is spread over stages."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> None:
        raise NotImplementedError("stages run the forward of the model")


class ShardedStages(ShardedModel):
    """The parameters of a rank's pipeline stages under torch's ``fully_shard``.

    They are gathered once for all micro-batches of a step, and gradients are reduced after the last one. The root's
    unit holds what no called module owns alone: parameters of modules above a cut, and ones tied across stages.

    Args:
        model: parameters of the stages become DTensors in its place; those on the meta device are other ranks'.
        units: modules that a stage calls, by path; parameters of a module outside of inner units are a unit.
        mesh: of the ranks that share parameters.
        policy: as for :class:`ShardedModel`.
    """

    def __init__(
        self, model: nn.Module, units: Mapping[str, FullyShard], mesh: DeviceMesh, *, policy: Policy | None = None
    ) -> None:
        kept = {path: dataclasses.replace(unit, reshard_after_forward=False) for path, unit in units.items()}
        super().__init__(model, kept, mesh, policy=policy, root=_Root(model))
        begin(self._units)
        for unit in self._units:
            unit.set_requires_gradient_sync(False)
            unit.set_reshard_after_backward(False)
            unit.set_is_last_backward(False)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather all parameters for the block."""
        for unit in self._units:
            unit.unshard()
        try:
            yield
        finally:
            for unit in self._units:
                unit.reshard()

    def reduce_gradients(self) -> None:
        """Reduce the gradients of all micro-batches to shards, averaged over the replicas."""
        for unit in self._units:
            unit.set_requires_gradient_sync(True)
        try:
            reduce_accumulated(self._units)
        finally:
            for unit in self._units:
                unit.set_requires_gradient_sync(False)


def shard_stages(
    schedule: Schedule, stages: Iterable[nn.Module], precision: ModelPrecision, options: Mapping[str, Any]
) -> ShardedStages:
    """Put shards in the places of the parameters of a pipeline rank.

    Args:
        schedule: whose model is cut; parameters of other ranks are on the meta device.
        stages: the modules of this rank's stages.
        precision: of the model.
        options: of the plan.
    """
    local = called_paths(schedule.model, stages)
    units = with_islands(schedule, units_of_stages(schedule, local), options)
    own = {path: unit for path, unit in units.items() if path in local}
    mesh = mesh_of_shards(schedule.mesh, precision.device)
    return ShardedStages(schedule.model, own, mesh, policy=precision.policy)
