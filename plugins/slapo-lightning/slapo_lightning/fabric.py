"""The strategy of Lightning's Fabric."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import slapo_core as slapo
from slapo_lightning.scheduled import ScheduledStrategy


class SlapoStrategy(ScheduledStrategy, DDPStrategy):
    """Train a module under a schedule in a loop of Fabric: over ``tp``, ``dp`` x ``tp``, and ``fully_shard``.

    ``fabric.setup_module(model)`` applies the steps; the optimizer is made of its parameters afterwards.

    Args:
        schedule: as for :class:`slapo_lightning.SlapoStrategy`.
        mesh: as there.
        path: for a function: of the submodule that is scheduled; None: the module itself.
        process_group_backend: as there.
        timeout: as there.
        ddp: as there.

    Raises:
        ArgumentError: no schedule and no function, or no mesh.
        MeshError: the mesh has stages (``pp``), or an unknown dimension.

    Example:
        ::

            fabric = Fabric(strategy=SlapoStrategy(steps, mesh={"dp": 2, "tp": 2}), devices=4)
            fabric.launch()
            model = fabric.setup_module(model)
            optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
    """

    all_reduce = ScheduledStrategy.reduce

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """Schedule a module."""
        if self.sch is not None and not self._is_scheduled(module):
            raise slapo.ArgumentError(
                f"SlapoStrategy has scheduled a {type(self.sch.model).__name__}, and a strategy schedules one module",
                hint="hold what is trained in one module",
            )
        self._path = "" if self._path is None else self._path
        self._schedule(module)
        self._share_scale(self.precision)
        self._backward_sync_control = _NoSync(self)
        return self._over_replicas(module)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let an optimizer of the scheduled module load full states, of which every rank keeps its shards."""
        assert self.sch is not None
        live = {id(parameter) for parameter in self.sch.model.parameters()}
        if any(id(parameter) not in live for group in optimizer.param_groups for parameter in group["params"]):
            raise slapo.OptimizerError(
                "the optimizer was made before the steps of the schedule, which replaced its parameters",
                hint="model = fabric.setup_module(model); optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3); "
                "optimizer = fabric.setup_optimizers(optimizer)",
            )
        load = functools.partial(slapo.load_optimizer_state_dict, self.sch, optimizer)
        optimizer.load_state_dict = load  # type: ignore[method-assign]
        return optimizer

    def clip_gradients_norm(
        self, module: Any, optimizer: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = True
    ) -> torch.Tensor:
        """Clip by the norm of the whole model, which is returned."""
        self.precision.unscale_gradients(optimizer)
        return slapo.clip_grad_norm_(self.sch, max_norm, norm_type, error_if_nonfinite)  # type: ignore[arg-type]

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the state of the module as written, on the first rank; a collective."""
        return self._state_dict(_unwrapped(module))

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load a checkpoint of any mesh, or of a single process."""
        self._load_state_dict(_unwrapped(module), state_dict, strict)

    def get_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state of all ranks, by the names of the reference model, on the first rank; a collective."""
        return slapo.optimizer_state_dict(self.sch, optimizer, rank0_only=True)  # type: ignore[arg-type]


def _unwrapped(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module


class _NoSync(_BackwardSyncControl):
    """Accumulation of gradients without exchange over replicas."""

    def __init__(self, strategy: SlapoStrategy) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
        return self._strategy._no_sync(module) if enabled else contextlib.nullcontext()
