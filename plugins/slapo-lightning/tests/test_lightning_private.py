"""What slapo-lightning uses of Lightning is there, with the parameters that it relies on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from lightning.fabric import strategies as of_fabric
from lightning.fabric.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.fabric.plugins.collectives import torch_collective
from lightning.fabric.strategies.strategy import Strategy as FabricStrategy
from lightning.fabric.utilities import distributed, optimizer as optimizers
from lightning.fabric.wrappers import _FabricModule
from lightning.pytorch import LightningModule, Trainer, strategies as of_trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.overrides import distributed as overrides
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.trainer.connectors import checkpoint_connector, data_connector
from lightning.pytorch.trainer.states import TrainerFn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from slapo_lightning import SlapoStrategy
from slapo_lightning.fabric import SlapoStrategy as FabricSlapoStrategy

CALLED: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "_sync_ddp_if_available": (distributed._sync_ddp_if_available, ("result", "group", "reduce_op")),
    "_all_gather_ddp_if_available": (distributed._all_gather_ddp_if_available, ("tensor", "group", "sync_grads")),
    "_optimizers_to_device": (optimizers._optimizers_to_device, ("optimizers", "device")),
    "_sync_module_states": (overrides._sync_module_states, ("module",)),
    "gather_all_tensors": (gather_all_tensors, ("result", "group")),
    "LayerSync.apply": (LayerSync.apply, ("self", "model")),
    "Precision.convert_module": (Precision.convert_module, ("self", "module")),
    "DDPStrategy.__init__": (of_trainer.DDPStrategy.__init__, ("process_group_backend", "timeout")),
    "DDPStrategy.__init__ of Fabric": (of_fabric.DDPStrategy.__init__, ("process_group_backend", "timeout")),
}
"""Functions that are called, and their parameters."""
OVERRIDDEN = {
    SlapoStrategy: (
        of_trainer.DDPStrategy,
        "setup_environment distributed_sampler_kwargs reduce all_gather reduce_boolean_decision setup "
        "setup_precision_plugin block_backward_sync lightning_module_state_dict load_model_state_dict optimizer_state "
        "load_optimizer_state_dict teardown",
    ),
    FabricSlapoStrategy: (
        of_fabric.DDPStrategy,
        "setup_environment distributed_sampler_kwargs all_reduce all_gather reduce_boolean_decision setup_module "
        "setup_optimizer clip_gradients_norm get_module_state_dict load_module_state_dict get_optimizer_state "
        "load_checkpoint",
    ),
}
"""Strategy -> its base, and the members of it that are overridden."""
ASKED = {
    "the precision plugin clips": (Precision.clip_gradients, "self.clip_grad_by_norm(optimizer, clip_val)"),
    "the scaler is an attribute": (MixedPrecision.optimizer_step, "self.scaler.unscale_(optimizer)"),
    "the scaler is an attribute of Fabric's": (FabricMixedPrecision.unscale_gradients, "self.scaler"),
    "samples by the strategy": (data_connector._DataConnector._resolve_sampler, "distributed_sampler_kwargs"),
    "samples by Fabric's strategy": (Fabric._setup_dataloader, "_strategy.distributed_sampler_kwargs"),
    "optimizer states": (checkpoint_connector._CheckpointConnector.dump_checkpoint, "strategy.optimizer_state("),
    "module state": (
        checkpoint_connector._CheckpointConnector._get_lightning_module_state_dict,
        "strategy.lightning_module_state_dict()",
    ),
    "loaded before setup": (Trainer._run, "if not self.strategy.restore_checkpoint_after_setup"),
    "no exchange in Fabric": (Fabric.no_backward_sync, "_backward_sync_control.no_backward_sync("),
    "clipping in Fabric": (Fabric.clip_gradients, "clip_gradients_norm("),
    "states in Fabric": (FabricStrategy._convert_stateful_objects_in_state, "self.get_optimizer_state(optimizer=obj)"),
    "steps of the host": (Strategy.training_step, "self.lightning_module.training_step("),
    "forwards of Fabric": (_FabricModule.forward, "self._forward_module("),
    "the wrapper of the module": (of_trainer.DDPStrategy.__init__, "self._ddp_kwargs = kwargs"),
    "synchronized batch norm": (of_trainer.ParallelStrategy.__init__, "self._layer_sync"),
    "a compiled module": (LightningModule.__init__, "self._compiler_ctx"),
    "states of metrics": (Metric.__init__, "self.dist_sync_fn"),
}
"""What a function of the host must contain."""


@pytest.mark.parametrize("seam", CALLED)
def test_a_function_has_its_parameters(seam: str) -> None:
    function, names = CALLED[seam]
    assert set(names) <= set(inspect.signature(function).parameters), f"Lightning has moved {seam}"


@pytest.mark.parametrize("strategy", OVERRIDDEN, ids=["Trainer", "Fabric"])
def test_an_overridden_member_is_one_of_the_host_with_its_parameters(strategy: type) -> None:
    base, members = OVERRIDDEN[strategy]
    for name in members.split():
        assert hasattr(base, name), f"Lightning has moved {base.__name__}.{name}"
        theirs, ours = getattr(base, name), getattr(strategy, name)
        assert theirs is not ours, name
        if callable(theirs):
            required = list(inspect.signature(theirs).parameters)
            own = inspect.signature(ours).parameters
            takes_more = any(one.kind is one.VAR_KEYWORD for one in own.values())
            assert takes_more or required == list(own), f"Lightning has changed the parameters of {name}: {required}"


@pytest.mark.parametrize("seam", ASKED)
def test_the_host_asks_the_strategy(seam: str) -> None:
    function, text = ASKED[seam]
    assert text in inspect.getsource(function), f"Lightning has moved a seam: {seam} ({function.__qualname__}: {text})"


def test_names_of_the_host() -> None:
    assert TrainerFn.FITTING.value == "fit"
    assert isinstance(LightningOptimizer.optimizer, property)
    assert torch_collective.default_pg_timeout.total_seconds() > 0
    assert Strategy.__module__ == "lightning.pytorch.strategies.strategy"  # the first forward looks for it
    assert _FabricModule.__module__ == "lightning.fabric.wrappers"
