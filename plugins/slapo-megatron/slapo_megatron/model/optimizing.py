"""Megatron's optimizer and its scheduler. Imports Megatron: import it in functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

if TYPE_CHECKING:
    from slapo_core.spec.request import BuildRequest

__all__ = ["optimizer_of", "scheduler_of"]


def optimizer_of(options: Mapping[str, Any], request: BuildRequest, chunks: Sequence[Any]) -> Any:
    """Of the user's factory, or by ``optimizer_config``.

    Args:
        options: of the plan.
        request: of the build.
        chunks: the model as DistributedDataParallel has it.
    """
    config = OptimizerConfig(**options["optimizer_config"])
    inner = request.make_optimizer()
    if inner is None:
        return get_megatron_optimizer(config, list(chunks))
    from megatron.core import parallel_state

    wrapped = FP32Optimizer(inner, config, lambda *_: None)
    wrapped.grad_stats_parallel_group = parallel_state.get_model_parallel_group()
    wrapped.tp_group = parallel_state.get_tensor_model_parallel_group()
    return ChainedOptimizer([wrapped])


def scheduler_of(options: Mapping[str, Any], optimizer: Any) -> Any:
    """Without it, what groups of parameters multiply rates and decays with has no effect.

    Args:
        options: of the plan.
        optimizer: Megatron's.
    """
    config = optimizer.config
    arguments: dict[str, Any] = {
        "init_lr": 0.0,
        "max_lr": config.lr,
        "min_lr": config.min_lr or 0.0,
        "lr_warmup_steps": 0,
        "lr_decay_steps": 1,
        "lr_decay_style": "constant",
        "start_wd": config.weight_decay,
        "end_wd": config.weight_decay,
        "wd_incr_steps": 1,
        "wd_incr_style": "constant",
        **options["scheduler"],
    }
    return OptimizerParamScheduler(optimizer, **arguments)
