"""The strategy of Lightning's Trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

import slapo_core as slapo
from slapo_lightning.scheduled import ScheduledStrategy


class SlapoStrategy(ScheduledStrategy, DDPStrategy):
    """Train a submodule of a LightningModule under a schedule: over ``tp``, ``dp`` x ``tp``, and ``fully_shard``.

    The steps are applied when processes run and the module has its values: after ``configure_model`` and the precision
    plugin, before ``configure_optimizers``. Norms are of the entire model; ranks along ``tp`` take the same samples;
    a checkpoint is the one that a single process writes, and loads under any mesh.

    Args:
        schedule: a function that applies steps to the schedule it is given, and perhaps shards
            (:func:`slapo_core.fully_shard`); or the schedule of a submodule, made in the running processes.
        mesh: for a function: ``{"dp": 2, "tp": 2}``, outermost dimension first; its product is the number of processes.
        path: for a function: of the submodule, e.g. ``"model"``; None: the only child that has parameters.
        process_group_backend: as for Lightning's DDPStrategy.
        timeout: as there.
        ddp: arguments of DistributedDataParallel over ``dp``, e.g. ``find_unused_parameters=True``.

    Raises:
        ArgumentError: no schedule and no function, or no mesh.
        MeshError: the mesh has stages (``pp``), or an unknown dimension.

    Example:
        ::

            def steps(sch):
                for layer in sch["transformer.h.*"]:
                    ...

            Trainer(strategy=SlapoStrategy(steps, mesh={"dp": 2, "tp": 2}), devices=4, gradient_clip_val=1.0)
    """

    def setup(self, trainer: Trainer) -> None:
        """Schedule the module, then make the optimizers."""
        module: Any = self.lightning_module
        if module._compiler_ctx is not None:
            raise slapo.ArgumentError(
                f"torch.compile was called with this {type(module).__name__}, before the steps",
                hint='compile parts by steps, e.g. sch["layers.*"].compile(), and give Trainer the module itself',
            )
        self.accelerator.setup(trainer)  # type: ignore[union-attr]
        if self._layer_sync is not None and not self._is_scheduled(module):
            self._layer_sync.apply(module)
        self.precision_plugin.convert_module(module)
        self.model_to_device()
        self._path = _only_child(module) if self._path is None and self._sizes is not None else self._path
        self._schedule(module)
        for metric in module.modules():
            if isinstance(metric, Metric) and metric.dist_sync_fn is None:
                metric.dist_sync_fn = self._gather_states
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting:
            self.model = self._over_replicas(module)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if is_fitting:
            _optimizers_to_device(self.optimizers, self.root_device)

    def setup_precision_plugin(self) -> None:
        """Let the precision plugin clip by the norm of the entire model."""
        self.precision_plugin.clip_grad_by_norm = self._clip  # type: ignore[method-assign]
        self._share_scale(self.precision_plugin)
        super().setup_precision_plugin()

    def _clip(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        sch: Any = self.sch
        held = sum(len(group["params"]) for group in optimizer.param_groups)
        trained = sum(parameter.requires_grad for parameter in sch.model.parameters())
        if held < trained:
            raise slapo.BuildError(
                f"Trainer clips the gradients of one optimizer, which holds {held} of {trained} trained parameters",
                hint="in configure_gradient_clipping: slapo.clip_grad_norm_(self.trainer.strategy.sch, 1.0)",
            )
        slapo.clip_grad_norm_(sch, clip_val)

    def block_backward_sync(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        """Accumulate gradients without exchange over replicas."""
        return self.no_backward_sync(self.model)

    def _gather_states(self, state: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        """Gather a state of a metric over distinct samples."""
        states = [state]
        for one in self._groups(group):
            states = [theirs for own in states for theirs in gather_all_tensors(own, one)]
        return states

    # -- checkpoints --------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the module as written, on the first rank; a collective."""
        return self._state_dict(self.lightning_module)  # type: ignore[arg-type]

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load a checkpoint of any mesh, or of a single process."""
        module: Any = self.lightning_module
        if self._is_scheduled(module):
            self._load_state_dict(module, checkpoint["state_dict"], strict)
        else:
            self.precision_plugin.convert_module(module)  # before values of its types are rounded to others
            super().load_model_state_dict(checkpoint, strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of all ranks, by the names of the reference model, on the first rank; a collective."""
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return slapo.optimizer_state_dict(self.sch, plain, rank0_only=True)  # type: ignore[arg-type]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of a checkpoint of any mesh; every rank keeps its shards."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            slapo.load_optimizer_state_dict(self.sch, optimizer, state)  # type: ignore[arg-type]

    def teardown(self) -> None:
        """Leave the module on its device, where its shards can be saved."""
        for one in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            one.teardown()  # type: ignore[union-attr]


def _only_child(module: nn.Module) -> str:
    """Return the path of the only child that has parameters."""
    found = [name for name, child in module.named_children() if any(True for _ in child.parameters())]
    if len(found) != 1:
        raise slapo.ArgumentError(
            f"one child of this {type(module).__name__} is scheduled, and {len(found)} have parameters: {found}",
            hint="name it: SlapoStrategy(steps, mesh=..., path='model')",
        )
    return found[0]
