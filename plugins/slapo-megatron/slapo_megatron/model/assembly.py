"""Assemble Megatron's objects around the chunks of a model. Imports Megatron: import it in functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from slapo_core import BuildError
from slapo_megatron.model.buckets import refuse_missing
from slapo_megatron.model.chunk import lower_model, working_dtype
from slapo_megatron.model.optimizer import optimizer_of, scheduler_of
from slapo_megatron.model.parameter_gather import Gathering
from slapo_megatron.rng_tracker import Following
from slapo_megatron.runtime import Megatron

if TYPE_CHECKING:
    import torch

    from slapo_core import Plan
    from slapo_core.layout import Mesh
    from slapo_megatron.marks import Marks
    from slapo_megatron.runtime import Megatron
    from slapo_runtime.context import BuildContext


def transformer_config(options: Mapping[str, Any], mesh: Mesh | None) -> TransformerConfig:
    """Make the configuration for DistributedDataParallel and the schedules; its layer sizes are dummies.

    Args:
        options: of the plan.
        mesh: of the schedule.
    """
    size = mesh.size if mesh is not None else lambda _: 1
    heads = size("tp")
    return TransformerConfig(
        num_layers=size("pp"),
        hidden_size=heads,
        num_attention_heads=heads,
        **options["model_parallel_config"],
    )


def finalizer(sum_ties: Callable[[], None] | None = None) -> Callable[..., None]:
    """Return the gradient finalizer: Megatron's own, then the sum of ties over stages.

    Args:
        sum_ties: sums ``main_grad`` of every parameter that several stages hold, over exactly those; None without a
            pipeline. Gradients are averaged over the replicas by then.

    Returns:
        for ``config.finalize_model_grads_func``.
    """

    def finalize(model: list[Any], *args: Any, **kwargs: Any) -> None:
        refuse_missing(model)
        finalize_model_grads(model, *args, **kwargs)
        if sum_ties is not None:
            sum_ties()

    return finalize


def refuse_shared_memory(context: BuildContext) -> None:
    """To be called where parameters move into buffers; one object under several names is a tie, and stays one.

    Args:
        context: of the build; every tensor is in its place.

    Raises:
        BuildError: two parameters have elements in common.
    """
    here = {
        id(live.tensor): (live.name, live.tensor)
        for live in context.state.tensors()
        if live.is_parameter and live.is_local and live.tensor.numel() and not live.tensor.is_meta
    }
    last: tuple[str, torch.Tensor] | None = None
    for name, tensor in sorted(here.values(), key=lambda one: one[1].data_ptr()):
        if last is not None and _overlap(last[1], tensor):
            raise BuildError(
                f"'{last[0]}' and '{name}' are different parameters over one memory, which Megatron's distributed "
                "optimizer and its low precision part: each would train alone",
                hint="make them one parameter, under both names, before create_schedule",
            )
        last = name, tensor


def _overlap(one: torch.Tensor, later: torch.Tensor) -> bool:
    """Whether they have elements in common; ``later`` does not begin before ``one``."""
    if one.data_ptr() == later.data_ptr():
        return True
    end = one.data_ptr() + one.numel() * one.element_size()
    return one.is_contiguous() and later.is_contiguous() and later.data_ptr() < end


def release(megatron: Megatron, marks: Marks, *, gather: bool = True) -> None:
    """End the hooks of its wrappers and its random states, and take the marks back; the parameters keep their values.

    With ``overlap_param_gather`` it is a collective over the replicas: they get the values that are still to come.

    Args:
        megatron: of an engine; its wrappers reduce nothing any more.
        marks: of its parameters.
        gather: whether the replicas get those values; False after a step that failed, whose groups are broken.
    """
    for chunk in megatron.chunks:
        if chunk.use_forward_hook and chunk.remove_forward_pre_hook_handles:
            chunk.disable_forward_pre_hook(param_sync=gather)
        chunk.param_to_bucket_group.clear()  # without it, the hooks of the backward pass leave a gradient alone
        for parameter in chunk.parameters():
            parameter.grad = None  # the buffer's memory, or nothing
    if megatron.following is not None:
        megatron.following.stop()
    marks.take_back()


def assemble(
    plan: Plan,
    context: BuildContext,
    chunks: Sequence[nn.Module],
    config: Any,
    *,
    sum_ties: Callable[[], None] | None = None,
) -> Megatron:
    """Wrap every chunk, and make what trains them; groups are there, and parameters are marked.

    Args:
        plan: its ``config`` has every option, filled in.
        context: of the build; its optimizer is made here.
        chunks: the model, or this rank's stages of it in the order of the pipeline; each is a
            :class:`~slapo_megatron.model.chunk.Chunk`.
        config: Megatron's ``TransformerConfig``; its functions for schedules are set here.
        sum_ties: as for :func:`~slapo_megatron.model.assembly.finalizer`.

    Raises:
        BuildError: Megatron cannot train these parameters, or wrap the optimizer, or two would sum one gradient.
    """
    options = plan.config
    _refuse_sums(context, config)
    dtype = working_dtype(config)
    if options["ddp_config"].get("use_distributed_optimizer") or dtype is not None:
        refuse_shared_memory(context)
    lower_model(context.schedule.model, dtype)
    # one object a chunk: Megatron writes the size of buckets into it
    wrapped = [
        DistributedDataParallel(
            config, DistributedDataParallelConfig(**options["ddp_config"]), chunk, disable_bucketing=number > 0
        )
        for number, chunk in enumerate(chunks)
    ]
    optimizer = optimizer_of(options, context, wrapped) if _trains(plan, context) else None
    scheduler = None if optimizer is None or context.optimizer is not None else scheduler_of(options, optimizer)
    config.finalize_model_grads_func = finalizer(sum_ties)
    if optimizer is not None:
        config.grad_scale_func = optimizer.scale_loss
    _enable_overlap(config, wrapped)
    return Megatron(wrapped, optimizer, scheduler, config, Following())


def _trains(plan: Plan, context: BuildContext) -> bool:
    return context.optimizer is not None or plan.config["optimizer_config"].get("lr") is not None


def _refuse_sums(context: BuildContext, config: Any) -> None:
    """Refuse parameters whose gradient both Megatron and a step would sum over ``tp``."""
    mesh = context.schedule.mesh
    marked = {
        live.name
        for live in context.state.tensors()
        if live.is_parameter and getattr(live.tensor, "sequence_parallel", False)
    }
    if mesh is None or mesh.size("tp") == 1 or not marked:
        return
    if not config.sequence_parallel:
        raise BuildError(
            f"'{min(marked)}' is marked sequence_parallel, and Megatron sums the gradients of such parameters over "
            "'tp' only where it is told to",
            hint='model_parallel_config={"sequence_parallel": True}',
        )
    for record in context.schedule.records:
        if record.name != "tp.sync_gradient":
            continue
        names = record.primitive.names  # type: ignore[attr-defined]
        for name in (names,) if isinstance(names, str) else names:
            if f"{record.path}.{name}".lstrip(".") in marked:
                raise BuildError(
                    f"{record} sums the gradient of '{name}' over 'tp', and Megatron would once more, because the "
                    "parameter is marked sequence_parallel",
                    hint="leave out that step, or the mark",
                )


def _enable_overlap(config: Any, wrapped: Sequence[Any]) -> None:
    """Set the callbacks of the schedules that overlap communication with computation, if requested."""
    ddp_config = wrapped[0].ddp_config
    for chunk in wrapped:
        if chunk.use_forward_hook:
            chunk.module.around = Gathering(chunk).around

    def functions(name: str) -> Any:
        found = [getattr(chunk, name) for chunk in wrapped]
        return found[0] if len(found) == 1 else found

    if ddp_config.overlap_grad_reduce:
        config.no_sync_func = functions("no_sync")
    if ddp_config.overlap_param_gather and ddp_config.align_param_gather:
        config.param_sync_func = functions("start_param_sync")
