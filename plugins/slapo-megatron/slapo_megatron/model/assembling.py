"""Chunks of a model become Megatron's objects: wrapped, with an optimizer and a scheduler.

Imports Megatron: import it in functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import nn

from slapo_core import BuildError
from slapo_megatron.model.finalizing import finalizer
from slapo_megatron.model.gathering import Gathering
from slapo_megatron.model.optimizing import optimizer_of, scheduler_of
from slapo_megatron.model.precision import lower_model, working_dtype
from slapo_megatron.model.storages import refuse_shared_memory
from slapo_megatron.random.following import Following
from slapo_megatron.runtime import Megatron

if TYPE_CHECKING:
    from slapo_core import Plan
    from slapo_core.spec.request import BuildRequest

__all__ = ["assemble"]


def assemble(
    plan: Plan,
    request: BuildRequest,
    chunks: Sequence[nn.Module],
    config: Any,
    *,
    sum_ties: Callable[[], None] | None = None,
) -> Megatron:
    """Wrap every chunk, and make what trains them; groups are there, and parameters are marked.

    Args:
        plan: its ``config`` has every option, filled in.
        request: of the build; its optimizer is made here.
        chunks: the model, or this rank's stages of it in the order of the pipeline; each is a
            :class:`~slapo_megatron.model.chunk.Chunk`.
        config: Megatron's ``TransformerConfig``; its functions for schedules are set here.
        sum_ties: as for :func:`~slapo_megatron.model.finalizing.finalizer`.

    Raises:
        BuildError: Megatron cannot train these parameters, or wrap the optimizer, or two would sum one gradient.
    """
    options = plan.config
    _refuse_sums(request, config)
    dtype = working_dtype(config)
    if options["ddp_config"].get("use_distributed_optimizer") or dtype is not None:
        refuse_shared_memory(request)
    lower_model(request.schedule.model, dtype)
    # one object a chunk: Megatron writes the size of buckets into it
    wrapped = [
        DistributedDataParallel(
            config, DistributedDataParallelConfig(**options["ddp_config"]), chunk, disable_bucketing=number > 0
        )
        for number, chunk in enumerate(chunks)
    ]
    optimizer = optimizer_of(options, request, wrapped) if _trains(plan, request) else None
    scheduler = None if optimizer is None or request.optimizer is not None else scheduler_of(options, optimizer)
    config.finalize_model_grads_func = finalizer(sum_ties)
    if optimizer is not None:
        config.grad_scale_func = optimizer.scale_loss
    _overlap(config, wrapped)
    return Megatron(wrapped, optimizer, scheduler, config, Following())


def _trains(plan: Plan, request: BuildRequest) -> bool:
    return request.optimizer is not None or plan.config["optimizer_config"].get("lr") is not None


def _refuse_sums(request: BuildRequest, config: Any) -> None:
    """Where a parameter is marked for Megatron to sum its gradient over ``tp``, Megatron does, and nobody else."""
    mesh = request.schedule.mesh
    marked = {
        live.name
        for live in request.state.tensors()
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
    for record in request.schedule.records:
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


def _overlap(config: Any, wrapped: Sequence[Any]) -> None:
    """What the schedules call so that communication runs beside computation, where the options ask for it."""
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
