"""Wrap the model for Megatron: chunks in DistributedDataParallel, the optimizer and its scheduler.

Imports Megatron: import it in functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import nn

from slapo_core import BuildError
from slapo_megatron.config import trains
from slapo_megatron.private import bucket_groups, tree_map
from slapo_megatron.runtime import Megatron

if TYPE_CHECKING:
    from slapo_core import Plan, Schedule
    from slapo_megatron.marks import Marks
    from slapo_runtime.context import BuildContext

_LOW = (torch.float16, torch.bfloat16)


def working_dtype(config: Any) -> torch.dtype | None:
    """Return the forward's dtype in lower precision; None in the parameters' own.

    Args:
        config: Megatron's, of a model or of an optimizer.
    """
    if config.bf16:
        return torch.bfloat16
    return torch.float16 if config.fp16 else None


def lower_model(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Cast the parameters in place; each stays the same object.

    Buffers keep their dtypes, unlike in Megatron's ``Float16Module``: rotary frequencies in bfloat16 rotate position
    4000 by 0.7 rad.

    Args:
        model: the scheduled one, materialized.
        dtype: None does nothing.
    """
    if dtype is not None:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)


def lowered(values: Any, dtype: torch.dtype | None) -> Any:
    """Cast inputs of the model, nested or not, from float32 to ``dtype``; None leaves them."""
    if dtype is None:
        return values
    return tree_map(lambda one: one.to(dtype) if _has(one, (torch.float32,)) else one, values)


def raised(values: Any, dtype: torch.dtype | None) -> Any:
    """Cast outputs of the model, nested or not, from lower precision to float32, unless ``dtype`` is None."""
    if dtype is None:
        return values
    return tree_map(lambda one: one.float() if _has(one, _LOW) else one, values)


def _has(value: Any, dtypes: tuple[torch.dtype, ...]) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in dtypes


class Chunk(nn.Module):
    """Wrap a model for DistributedDataParallel and Megatron's schedules.

    Args:
        model: the scheduled one; its forward gets this module's arguments. In lower precision, float32 inputs are cast
            down, and outputs are cast to float32.
        config: Megatron's.

    Attributes:
        gather: called before each forward of the model: with ``overlap_param_gather`` it waits for all parameters. The
            hooks of DistributedDataParallel wait only for parameters of called modules; a traced graph, a stage, or
            ``nn.MultiheadAttention`` read parameters of modules that are not called.
    """

    model_type = ModelType.encoder_or_decoder
    pre_process = post_process = True
    share_embeddings_and_output_weights = False  # the engine sums all ties
    vp_stage: int | None = None

    def __init__(self, model: nn.Module, config: Any) -> None:
        super().__init__()
        self.model = model
        self.config = config
        self.gather: Callable[[], None] = lambda: None

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Ignore the previous stage's message: there is none."""

    def shared_embedding_or_output_weight(self) -> None:
        return None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        dtype = working_dtype(self.config)
        args, kwargs = lowered((args, kwargs), dtype)
        self.gather()
        return raised(self.model(*args, **kwargs), dtype)


def wrapped(chunks: Sequence[Chunk], config: Any, ddp_config: Mapping[str, Any]) -> list[Any]:
    """Wrap chunks in DistributedDataParallel, and set the callbacks by which schedules overlap communication.

    Args:
        chunks: of this rank, in the order of the pipeline.
        config: Megatron's ``TransformerConfig``, whose functions are set.
        ddp_config: fields of ``DistributedDataParallelConfig``.
    """
    # one object per chunk: Megatron writes the size of buckets into it
    made = [
        DistributedDataParallel(
            config, DistributedDataParallelConfig(**ddp_config), chunk, disable_bucketing=number > 0
        )
        for number, chunk in enumerate(chunks)
    ]
    for one in made:
        if one.use_forward_hook:
            one.module.gather = lambda one=one: _gather(one)

    def functions(name: str) -> Any:
        found = [getattr(one, name) for one in made]
        return found[0] if len(found) == 1 else found

    if made[0].ddp_config.overlap_grad_reduce:
        config.no_sync_func = functions("no_sync")
    if made[0].ddp_config.overlap_param_gather and made[0].ddp_config.align_param_gather:
        config.param_sync_func = functions("start_param_sync")
    return made


def _gather(chunk: Any) -> None:
    for group in bucket_groups(chunk):
        group.finish_param_sync(skip_next_bucket_dispatch=True)


def assemble(
    plan: Plan,
    context: BuildContext,
    chunks: Sequence[Chunk],
    config: Any,
    *,
    sum_ties: Callable[[], None] = lambda: None,
) -> Megatron:
    """Wrap every chunk, and make optimizer and scheduler, after process groups and marks.

    Args:
        plan: its ``config`` has the completed options.
        context: of the build; its optimizer is made here.
        chunks: the model, or this rank's stages in the order of the pipeline.
        config: Megatron's ``TransformerConfig``; its functions for schedules are set here.
        sum_ties: sums ``main_grad`` of every tied parameter over its stages, after the replicas have averaged it.

    Raises:
        BuildError: Megatron cannot train these parameters, or wrap the optimizer, or a gradient would be summed twice.
    """
    options = plan.config
    refuse_double_sums(context.schedule, context.state.tensors(), config)
    lower_model(context.schedule.model, working_dtype(config))
    made = wrapped(chunks, config, options["ddp_config"])
    optimizer = optimizer_of(options, context, made) if trains(options) or context.optimizer is not None else None
    own = optimizer is not None and context.optimizer is None

    def finalize(model: list[Any], *args: Any, **kwargs: Any) -> None:
        finalize_model_grads(model, *args, **kwargs)
        sum_ties()

    config.finalize_model_grads_func = finalize
    if optimizer is not None:
        config.grad_scale_func = optimizer.scale_loss
    # without a scheduler, the groups' multipliers of rates and decays have no effect
    scheduler = OptimizerParamScheduler(optimizer, **options["scheduler"]) if own else None
    return Megatron(made, optimizer, scheduler, config)


def release(megatron: Megatron, marks: Marks, *, gather: bool = True) -> None:
    """Remove the hooks of the wrappers and the marks; the parameters keep their values.

    With ``overlap_param_gather`` it is a collective over the replicas, which gathers the last step's parameters.

    Args:
        megatron: of an engine; afterwards its wrappers reduce nothing.
        marks: of its parameters.
        gather: whether to gather; False after a failed step, whose groups are broken.
    """
    for chunk in megatron.chunks:
        if chunk.use_forward_hook and chunk.remove_forward_pre_hook_handles:
            chunk.disable_forward_pre_hook(param_sync=gather)
        chunk.param_to_bucket_group.clear()  # without it, the backward hooks ignore gradients
        for parameter in chunk.parameters():
            parameter.grad = None  # a view of the buffer, or None
    marks.take_back()


def refuse_double_sums(schedule: Schedule, tensors: Sequence[Any], config: Any) -> None:
    """Refuse parameters whose gradient Megatron and a step would both sum over ``tp``.

    Args:
        schedule: of the model.
        tensors: the live ones.
        config: Megatron's.
    """
    mesh = schedule.mesh
    marked = {live.name for live in tensors if live.is_parameter and getattr(live.tensor, "sequence_parallel", False)}
    if mesh is None or mesh.size("tp") == 1 or not marked:
        return
    if not config.sequence_parallel:
        raise BuildError(
            f"'{min(marked)}' is marked sequence_parallel, but Megatron sums the gradients of such parameters over "
            "'tp' only with sequence_parallel=True",
            hint='model_parallel_config={"sequence_parallel": True}',
        )
    for record in schedule.records:
        if record.name == "tp.sync_gradient":
            names = record.primitive.names  # type: ignore[attr-defined]
            summed = {f"{record.path}.{name}".lstrip(".") for name in ([names] if isinstance(names, str) else names)}
            for name in sorted(marked & summed):
                raise BuildError(
                    f"{record} sums the gradient of '{name}' over 'tp', and Megatron would sum it again, because the "
                    "parameter is marked sequence_parallel",
                    hint="leave out that step, or the mark",
                )


# -- the optimizer ---------------------------------------------------------------------------------------------------


def optimizer_of(options: Mapping[str, Any], context: BuildContext, chunks: Sequence[Any]) -> Any:
    """Make the optimizer by the user's factory or by ``optimizer_config``.

    Args:
        options: of the plan.
        context: of the build.
        chunks: the model as DistributedDataParallel has it.

    Raises:
        BuildError: Megatron cannot wrap the factory's optimizer, or no parameter is marked for ``decoupled_lr``.
        OptimizerError: the factory's optimizer is invalid.
    """
    config = OptimizerConfig(**options["optimizer_config"])
    if context.optimizer is None:
        name = "is_embedding_or_output_parameter"
        marked = any(getattr(live.tensor, name, False) for live in context.state.tensors() if live.is_parameter)
        if config.decoupled_lr is not None and not marked:
            raise BuildError(
                f"decoupled_lr={config.decoupled_lr} of optimizer_config needs parameters marked `{name}`; none is "
                "marked",
                hint=f"model.get_input_embeddings().weight.{name} = True, before create_schedule",
            )
        if not context.has_groups_of_parameters:
            raise BuildError(
                "Megatron makes its own groups for the optimizer of optimizer_config: no decay of biases and 1-D "
                "parameters, decoupled_lr for embeddings; no_decay and param_groups have no effect on it",
                hint="give a factory, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4), or leave them out",
            )
        return get_megatron_optimizer(config, list(chunks))
    inner = context.make_optimizer(
        partitioned=config.use_distributed_optimizer, has_main_weights=config.bf16 or config.fp16
    )
    return ChainedOptimizer([_wrapped(inner, config, chunks)])


def _wrapped(inner: Any, config: OptimizerConfig, chunks: Sequence[Any]) -> Any:
    """Wrap the user's optimizer in Megatron's classes."""
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
        group["params"] = [one for one in group["params"] if one.requires_grad]  # Megatron accepts no others
    several = chunks[0].ddp_config.num_distributed_optimizer_instances > 1
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
        distributed_optimizer_instance_id=(
            parallel_state.get_inter_distributed_optimizer_instance_group().rank() if several else 0
        ),
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
    """Initialize no state: the user's optimizer makes it in its first step."""
