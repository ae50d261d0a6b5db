"""Megatron's optimizer and its scheduler. Imports Megatron: import it in functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from slapo_core import BuildError

if TYPE_CHECKING:
    from slapo_runtime.context import BuildContext


def optimizer_of(options: Mapping[str, Any], context: BuildContext, chunks: Sequence[Any]) -> Any:
    """Make the optimizer by the user's factory or by ``optimizer_config``.

    Args:
        options: of the plan.
        context: of the build.
        chunks: the model as DistributedDataParallel has it.

    Raises:
        BuildError: Megatron cannot wrap the factory's optimizer, or a setting has nothing to act on; or a parameter is
            not contiguous.
        OptimizerError: the factory made something that cannot be.
    """
    config = OptimizerConfig(**options["optimizer_config"])
    if not config.use_distributed_optimizer:  # that one has them in buffers
        _refuse_strided(context)
    if context.optimizer is None:
        _refuse_without_embeddings(context, config)
        return get_megatron_optimizer(config, list(chunks))
    inner = context.make_optimizer(partitioned=config.use_distributed_optimizer)
    return ChainedOptimizer([_wrapped(inner, config, chunks)])


def _wrapped(inner: Any, config: OptimizerConfig, chunks: Sequence[Any]) -> Any:
    """The user's optimizer where Megatron's own would be."""
    wrapper: Any
    if config.use_distributed_optimizer:
        wrapper = _distributed(inner, config, chunks)
    elif config.bf16 or config.fp16:
        wrapper = Float16OptimizerWithFloat16Params(inner, config, _scaler(config), _no_state)
        wrapper.grad_stats_parallel_group = parallel_state.get_model_parallel_group()
    else:
        wrapper = FP32Optimizer(inner, config, _no_state)
        wrapper.grad_stats_parallel_group = parallel_state.get_model_parallel_group()
    wrapper.tp_group = parallel_state.get_tensor_model_parallel_group()
    return wrapper


def _distributed(inner: Any, config: OptimizerConfig, chunks: Sequence[Any]) -> DistributedOptimizer:
    if not isinstance(inner, torch.optim.AdamW):
        raise BuildError(
            f"Megatron's distributed optimizer steps AdamW only, and the factory makes {type(inner).__name__}",
            hint="optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4), or leave "
            '"use_distributed_optimizer" out',
        )
    for group in inner.param_groups:
        group["params"] = [one for one in group["params"] if one.requires_grad]  # it takes no others
    wrapper = DistributedOptimizer(
        inner,
        config,
        _scaler(config),
        _no_state,
        model_chunks=list(chunks),
        per_model_buffers={number: chunk.buffers for number, chunk in enumerate(chunks)},
        data_parallel_group=parallel_state.get_data_parallel_group(
            with_context_parallel=True, partial_data_parallel=True
        ),
        data_parallel_group_gloo=parallel_state.get_data_parallel_group_gloo(
            with_context_parallel=True, partial_data_parallel=True
        ),
        data_parallel_group_idx=parallel_state.get_model_parallel_group().rank(),
        distributed_optimizer_instance_id=0,
    )
    wrapper.grad_stats_parallel_group = parallel_state.get_intra_distributed_optimizer_instance_group()
    return wrapper


def _scaler(config: OptimizerConfig) -> Any:
    """Make the loss scaler that Megatron would choose."""
    if config.loss_scale:
        return ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )


def _no_state(*_: Any) -> None:
    """The user's optimizer makes its state in its first step."""


def _refuse_strided(context: BuildContext) -> None:
    """The optimizer's state has its parameter's layout, and is read and written as flat elements."""
    for live in context.state.tensors():
        if live.is_parameter and live.is_local and live.tensor.requires_grad and not live.tensor.is_contiguous():
            raise BuildError(
                f"'{live.name}' is not contiguous (strides {live.tensor.stride()} of shape "
                f"{tuple(live.tensor.shape)}), and could not be saved apart from Megatron's optimizer",
                hint=f"parameter.data = parameter.data.contiguous() for '{live.name}', before the schedule is made",
            )


def _refuse_without_embeddings(context: BuildContext, config: OptimizerConfig) -> None:
    """A separate rate for embeddings and the output layer needs parameters that are marked so."""
    if config.decoupled_lr is None:
        return
    name = "is_embedding_or_output_parameter"
    if not any(getattr(live.tensor, name, False) for live in context.state.tensors() if live.is_parameter):
        raise BuildError(
            f"optimizer_config has decoupled_lr={config.decoupled_lr}, which acts on parameters that are marked as "
            "those of embeddings and of the output layer, and none is",
            hint=f"before the schedule is made: model.get_input_embeddings().weight.{name} = True; or an optimizer "
            "factory with a group of its own for them",
        )


def scheduler_of(options: Mapping[str, Any], optimizer: Any) -> Any:
    """Without it, what groups of parameters multiply rates and decays with has no effect.

    Args:
        options: of the plan.
        optimizer: Megatron's.
    """
    return OptimizerParamScheduler(optimizer, **options["scheduler"])
