"""Megatron-core as a target of slapo: ``slapo_core.build(sch, target="megatron", optimizer_config={"lr": 1e-4})``.

Installing this distribution is enough. Megatron-core is imported when an engine is planned or built, and not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from slapo_core import Plan, Schedule

__all__ = ["model_chunks", "plan"]


def plan(
    sch: Schedule,
    *,
    optimizer: Any = None,
    loss: Any = None,
    max_grad_norm: float | None = None,
    device: torch.device | str | None = None,
    accumulate: int = 1,
    **options: Any,
) -> Plan:
    """Plan ``build(sch, target="megatron", ...)`` on this rank alone, building nothing.

    Args:
        sch: a schedule, with a mesh that may be only declared; it is not changed.
        optimizer: as for ``build``, like all that follows; only whether it is given matters.
        loss: only whether it is given matters.
        max_grad_norm: largest norm of all gradients.
        device: of the model.
        accumulate: number of micro-batches of a training step.
        options: of :class:`slapo_megatron.dialect.MegatronDialect`: ``optimizer_config``, ``ddp_config``, ...

    Returns:
        the plan; ``print`` it. ``plan.config`` has Megatron's completed configurations.

    Raises:
        BuildError: the options contradict the schedule or one of the arguments, or Megatron refuses them.
    """
    from slapo_megatron.dialect import MegatronDialect
    from slapo_runtime.planning import plan_of

    return plan_of(
        MegatronDialect(),
        sch,
        options,
        optimizer=optimizer,
        loss=loss,
        max_grad_norm=max_grad_norm,
        device=device,
        accumulate=accumulate,
    )


def model_chunks(
    sch: Schedule,
    *,
    ddp_config: Any = None,
    model_parallel_config: Any = None,
    optimizer_config: Any = None,
    wrap: bool = True,
) -> list[Any]:
    """Return the scheduled model as Megatron's model chunks, for a training loop of your own on megatron.core.

    Pass them to ``get_megatron_optimizer``, ``get_forward_backward_func`` and ``finalize_model_grads``; their
    ``config`` is the configuration for the schedules, whose functions your loop sets. Parameters have the marks by
    which Megatron counts norms and sums gradients over ``tp``. Process groups are made in the order of the mesh; groups
    of your script are compared with it. A collective: every rank calls it. ``slapo_core.state_dict(sch)`` returns the
    weights under the reference model's names, in the forward's precision.

    Args:
        sch: a schedule whose model is on the rank's device; with one rank along ``pp``.
        ddp_config: fields of Megatron's ``DistributedDataParallelConfig``, a dictionary or an object of that class.
        model_parallel_config: fields of its ``ModelParallelConfig``, likewise; or a ``TransformerConfig``.
        optimizer_config: fields of its ``OptimizerConfig``, as for your optimizer.
        wrap: in Megatron's DistributedDataParallel; False: one module, marked and cast, for your script to wrap.

    Returns:
        one chunk.

    Raises:
        BuildError: the options contradict the schedule, Megatron refuses them, there is no GPU, your script's groups
            have other ranks, or the mesh has several ranks along ``pp``.
    """
    from slapo_megatron.runtime import MEGATRON

    MEGATRON.require()
    from slapo_megatron.own_loop import chunks_for_own_loop

    options = {
        "ddp_config": ddp_config,
        "model_parallel_config": model_parallel_config,
        "optimizer_config": optimizer_config,
    }
    return chunks_for_own_loop(sch, options, wrap=wrap)
