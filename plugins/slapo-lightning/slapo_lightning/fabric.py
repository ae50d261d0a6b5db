"""The strategy of Lightning's Fabric."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.strategies import DDPStrategy
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
                hint="hold all trained parameters in one module",
            )
        self._path = self._path or ""
        self._schedule(module)
        self._share_scale(self.precision)
        self._backward_sync_control: Any = self
        return self._over_replicas(module)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Refuse an optimizer of parameters that steps have replaced."""
        assert self.sch is not None
        live = {id(parameter) for parameter in self.sch.model.parameters()}
        if any(id(parameter) not in live for group in optimizer.param_groups for parameter in group["params"]):
            raise slapo.OptimizerError(
                "the optimizer was made before the steps of the schedule, which replaced its parameters",
                hint="model = fabric.setup_module(model); optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3); "
                "optimizer = fabric.setup_optimizers(optimizer)",
            )
        return optimizer

    def clip_gradients_norm(
        self, module: Any, optimizer: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = True
    ) -> torch.Tensor:
        """Clip by the norm of the entire model, which is returned."""
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

    def load_checkpoint(self, path: Any, state: Any = None, strict: bool = True, **options: Any) -> dict[str, Any]:
        """Load a checkpoint of any mesh; every rank keeps its shards of weights and optimizers."""
        if isinstance(state, torch.optim.Optimizer):
            slapo.load_optimizer_state_dict(self.sch, state, super().load_checkpoint(path, **options))  # type: ignore[arg-type]
            return {}
        if not isinstance(state, dict):
            return super().load_checkpoint(path, state, strict, **options)
        optimizers = {name: one for name, one in state.items() if isinstance(one, torch.optim.Optimizer)}
        others = {name: one for name, one in state.items() if name not in optimizers}
        rest = super().load_checkpoint(path, others, strict, **options)
        for name, optimizer in optimizers.items():
            if strict or name in rest:
                slapo.load_optimizer_state_dict(self.sch, optimizer, rest.pop(name))  # type: ignore[arg-type]
        state.update(others)
        return rest


def _unwrapped(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module
