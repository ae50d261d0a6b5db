"""The stages of one rank become Megatron's objects. Imports Megatron: import it in functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from slapo_megatron.model.assembling import assemble
from slapo_megatron.pipeline.chunk import chunks_of

if TYPE_CHECKING:
    from slapo_core import Plan
    from slapo_core.spec.pipeline import Partition
    from slapo_core.spec.request import BuildRequest
    from slapo_megatron.runtime import Megatron

__all__ = ["assembled", "ties_of"]


def assembled(
    plan: Plan, request: BuildRequest, config: Any, partition: Partition, passes_are_over: Callable[[], None]
) -> Megatron:
    """One chunk for each stage of this rank.

    Args:
        plan: what is built.
        request: from ``build``; parameters are marked.
        config: Megatron's.
        partition: of the model, for any form of a batch.
        passes_are_over: called on every rank when all passes of a step are, before ranks wait in Megatron's groups.
    """
    mesh = request.schedule.mesh
    assert mesh is not None
    ranks = request.stage_ranks
    own = {stage.index: stage.module for stage in partition.stages if ranks[stage.index] == mesh.rank("pp")}
    config.virtual_pipeline_model_parallel_size = len(own) if len(own) > 1 else None
    chunks = chunks_of(own, _unused(request, own.values()), len(ranks), config)
    megatron = assemble(plan, request, chunks, config, sum_ties=lambda: request.sum_tied_gradients("main_grad"))
    finalize = config.finalize_model_grads_func

    def after_all(*args: Any, **kwargs: Any) -> None:
        passes_are_over()
        finalize(*args, **kwargs)

    config.finalize_model_grads_func = after_all
    return megatron


def ties_of(request: BuildRequest) -> list[nn.Parameter]:
    """Parameters of this rank that others along ``pp`` hold too.

    Args:
        request: from ``build``.
    """
    placement = request.placement
    assert placement is not None
    return [
        live.tensor
        for live in request.state.tensors()
        if live.is_local and isinstance(live.tensor, nn.Parameter) and len(placement.holders(live)) > 1
    ]


def _unused(request: BuildRequest, stages: Any) -> dict[str, nn.Parameter]:
    """Parameters that live on this rank and that no stage uses, by name."""
    held = {id(parameter) for stage in stages for parameter in stage.parameters()}
    here = {live.name: live.tensor for live in request.state.tensors() if live.is_local}
    return {name: one for name, one in here.items() if isinstance(one, nn.Parameter) and id(one) not in held}
