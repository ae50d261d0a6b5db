"""The schedule of a strategy, and its ranks: the part that the strategies of Trainer and Fabric have in common."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.distributed import _all_gather_ddp_if_available, _sync_ddp_if_available
from lightning.pytorch.overrides.distributed import _sync_module_states
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

import slapo_core as slapo
from slapo_core.layout import Mesh, check_sizes, declare_mesh
from slapo_torch.grad_scaler import MeshGradScaler


class ScheduledStrategy:
    """The members of a strategy of Lightning that know the schedule; before a ``DDPStrategy`` in the order of bases.

    Args:
        schedule: a function that applies steps to the schedule it is given, and perhaps shards
            (:func:`slapo_core.fully_shard`); or the schedule of a submodule, made in the running processes.
        mesh: for a function: ``{"dp": 2, "tp": 2}``, outermost dimension first; its product is the number of processes.
        path: for a function: of the submodule, e.g. ``"model"``.
        process_group_backend: as for Lightning's DDPStrategy.
        timeout: as there.
        ddp: arguments of DistributedDataParallel over ``dp``, e.g. ``find_unused_parameters=True``.

    Attributes:
        sch: the schedule of the module that the strategy has set up; None before.
    """

    def __init__(
        self,
        schedule: slapo.Schedule | Callable[[slapo.Schedule], Any],
        mesh: Mapping[str, int] | None = None,
        *,
        path: str | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        **ddp: Any,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)  # type: ignore[call-arg]
        self._given, self._sizes, self._path, self._ddp_kwargs = schedule, mesh, path, ddp
        self.sch: slapo.Schedule | None = None
        self._mesh = schedule.mesh if isinstance(schedule, slapo.Schedule) else None
        if isinstance(schedule, slapo.Schedule) != (mesh is None) or not (mesh is None or callable(schedule)):
            raise slapo.ArgumentError(
                "SlapoStrategy takes a function that applies steps to a schedule, and a mesh; or a schedule, with a "
                f"mesh of its own (got {type(schedule).__name__}, mesh={mesh})",
                hint='SlapoStrategy(steps, mesh={"dp": 2, "tp": 2}), with def steps(sch): ...',
            )
        check_sizes(mesh or {})
        sizes = self._mesh.sizes if self._mesh is not None else dict(mesh or {})
        if sizes.get("pp", 1) > 1:
            raise slapo.MeshError(
                f"SlapoStrategy does not train pipeline stages: the mesh {sizes} has several ranks along 'pp'",
                hint="a mesh of 'dp' and 'tp'; slapo.build(sch, optimizer=...) trains stages, in your own loop",
            )

    def setup_environment(self) -> None:
        """Start the processes, and make the mesh of their ranks."""
        super().setup_environment()  # type: ignore[misc]
        self._mesh = self._mesh or declare_mesh(self._sizes)
        mesh = self._mesh or Mesh({})
        if mesh.is_abstract or mesh.world_size != dist.get_world_size():
            raise slapo.MeshError(
                f"the schedule was made with {mesh!r}, and Lightning runs {dist.get_world_size()} processes",
                hint="SlapoStrategy(steps, mesh=...), with a function, makes the schedule in the running processes",
            )

    # -- the ranks ----------------------------------------------------------------------------------------------

    def _groups(self, given: Any = None) -> list[Any]:
        """Return the groups over which samples differ, the inner one first; Lightning gives all ranks for none."""
        if given is not None and given is not dist.group.WORLD:
            return [given]
        groups = [self._mesh.group(name) for name in ("dp", "dp_replicate")] if self._mesh is not None else []
        return [group for group in groups if group is not None]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """The place of this rank's samples: ranks along ``tp`` take the same."""
        mesh = self._mesh or Mesh({})
        replicas = mesh.size("dp_replicate") * mesh.size("dp")
        return {"num_replicas": replicas, "rank": mesh.rank("dp_replicate") * mesh.size("dp") + mesh.rank("dp")}

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a value over distinct samples, or over a group."""
        for one in self._groups(group) if isinstance(tensor, torch.Tensor) else ():
            tensor = _sync_ddp_if_available(tensor, one, reduce_op=reduce_op)
        return tensor

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Gather the values of distinct samples, or of a group, along a new first axis."""
        gathered = tensor[None]
        for one in self._groups(group):
            gathered = _all_gather_ddp_if_available(gathered, one, sync_grads).flatten(0, 1)
        return gathered

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decide as all ranks do, or as any."""
        agreed = torch.tensor(int(decision), device=self.root_device)  # type: ignore[attr-defined]
        dist.all_reduce(agreed, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(agreed)

    # -- the module ---------------------------------------------------------------------------------------------

    def _is_scheduled(self, module: nn.Module) -> bool:
        return self.sch is not None and any(one is self.sch.model for one in module.modules())

    def _schedule(self, module: nn.Module) -> None:
        """Apply the steps to the submodule, once; without a schedule, the values of the first rank are taken."""
        if self._is_scheduled(module):
            return
        if isinstance(self._given, slapo.Schedule):
            sch = self._given
            self._path = next((path for path, one in module.named_modules() if one is sch.model), None)
        else:
            _sync_module_states(module)
            sch = slapo.create_schedule(module.get_submodule(self._path or ""), mesh=self._mesh)
            self._given(sch)
        inside = {id(parameter) for parameter in sch.model.parameters()}
        others = [name for name, one in module.named_parameters() if one.requires_grad and id(one) not in inside]
        if others or self._path is None:
            what = "does not contain it" if self._path is None else f"trains '{others[0]}' beside it"
            raise slapo.ArgumentError(
                f"a {type(sch.model).__name__} is scheduled, and this {type(module).__name__} {what}",
                hint="hold all trained parameters in one submodule, e.g. self.model, and schedule that",
            )
        self.sch = sch

    def _over_replicas(self, module: nn.Module) -> nn.Module:
        """Return the module whose gradients are averaged over ``dp``: wrapped, unless ``fully_shard`` does it."""
        groups = self._groups()
        if isinstance(self.sch.model, FSDPModule) or not groups:  # type: ignore[union-attr]
            return module
        if len(groups) > 1:
            raise slapo.MeshError(
                f"no parameter is sharded along 'dp', of whose shards 'dp_replicate' has replicas: mesh {self._mesh}",
                hint="slapo.fully_shard(sch) as the last step; or one dimension 'dp'",
            )
        devices = None if self.root_device.type == "cpu" else [self.root_device.index]  # type: ignore[attr-defined]
        return DistributedDataParallel(module, device_ids=devices, process_group=groups[0], **self._ddp_kwargs)

    @contextlib.contextmanager
    def no_backward_sync(self, module: Any, enabled: bool = True) -> Iterator[None]:
        """Accumulate gradients without exchange over replicas."""
        sharded: Any = self.sch.model  # type: ignore[union-attr]
        with contextlib.ExitStack() as stack:
            if enabled and isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())
            elif enabled and isinstance(sharded, FSDPModule):
                sharded.set_requires_gradient_sync(False)
                stack.callback(sharded.set_requires_gradient_sync, True)
            yield

    def _share_scale(self, precision: Any) -> None:
        """Let all ranks skip a step where one of them finds a gradient that is not finite."""
        own = getattr(precision, "scaler", None)
        if own is not None and own.is_enabled() and not isinstance(own, MeshGradScaler):
            precision.scaler = MeshGradScaler(self.root_device, self._mesh)  # type: ignore[attr-defined]
            precision.scaler.load_state_dict(own.state_dict())

    # -- its state ----------------------------------------------------------------------------------------------

    def _state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the state of the module as written: on the first rank, and empty on others; a collective."""
        full = slapo.state_dict(self.sch, rank0_only=True)  # type: ignore[arg-type]
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # of shards, which are left out
            own = module.state_dict() if full else {}
        prefix = f"{self._path}." if self._path else ""
        own = {key: value for key, value in own.items() if not key.startswith(prefix)}
        return own | {prefix + key: value for key, value in full.items()}

    def _load_state_dict(self, module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
        """Load full tensors, of which every rank keeps its shards; a collective."""
        prefix = f"{self._path}." if self._path else ""
        inside = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        others = {key: value for key, value in state.items() if not key.startswith(prefix)}
        if not strict:
            inside = {key: inside.get(key, value) for key, value in slapo.state_dict(self.sch).items()}  # type: ignore[arg-type]
        slapo.load_state_dict(self.sch, inside)  # type: ignore[arg-type]
        missing, unexpected = module.load_state_dict(others, strict=False)
        wrong = [*unexpected, *(key for key in missing if not key.startswith(prefix))]
        if strict and wrong:
            raise slapo.WeightsError(
                f"the checkpoint and this {type(module).__name__} differ in {', '.join(map(repr, wrong))}",
                hint="a checkpoint of the same module; or strict loading switched off, as in Lightning",
            )
