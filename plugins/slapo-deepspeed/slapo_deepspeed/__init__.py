"""DeepSpeed as a target of slapo: ``slapo_core.build(sch, target="deepspeed", config="ds.json")``.

Installing this distribution is enough. DeepSpeed is imported when an engine is planned or built, and not before.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from slapo_core import Plan, Schedule
    from slapo_deepspeed.runtime import MeshUnit

__all__ = ["plan", "prepare"]


def plan(
    sch: Schedule,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    batch_axes: Mapping[str, int | None] | None = None,
    optimizer: Any = None,
    loss: Any = None,
    max_grad_norm: float | None = None,
    device: torch.device | str | None = None,
    accumulate: int = 1,
) -> Plan:
    """Plan ``build(sch, target="deepspeed", ...)`` on this rank alone, building nothing.

    Args:
        sch: a schedule, with a mesh that may be only declared; it is not changed.
        config: DeepSpeed's configuration, a dictionary or the path of a JSON file.
        batch_axes: as for ``build``, like all that follows.
        optimizer: only whether it is given matters.
        loss: only whether it is given matters.
        max_grad_norm: largest norm of all gradients.
        device: of the model.
        accumulate: number of micro-batches of a training step.

    Returns:
        the plan; ``print`` it. ``plan.config["config"]`` is DeepSpeed's completed configuration.

    Raises:
        BuildError: the configuration contradicts the schedule or one of the arguments, or DeepSpeed refuses it.
    """
    from slapo_deepspeed.dialect import DeepSpeedDialect
    from slapo_runtime.planning import plan_of

    return plan_of(
        DeepSpeedDialect(),
        sch,
        {"config": config, "batch_axes": batch_axes},
        optimizer=optimizer,
        loss=loss,
        max_grad_norm=max_grad_norm,
        device=device,
        accumulate=accumulate,
    )


def prepare(sch: Schedule) -> tuple[nn.Module, MeshUnit, list[nn.Parameter]]:
    """Prepare a scheduled model for ``deepspeed.initialize`` in your own script.

    ``module, mpu, parameters = slapo_deepspeed.prepare(sch)``, then ``deepspeed.initialize(model=module,
    model_parameters=parameters, mpu=mpu, config=...)``: DeepSpeed gets the process groups of the mesh, and parameters
    that a step shards over ``tp`` carry the marks by which its gradient norm counts them.

    Args:
        sch: without a pipeline; its model has its values, equal on every replica. It is sealed.

    Returns:
        the scheduled model; the groups of the mesh, as DeepSpeed's ``mpu``; the trained parameters.

    Raises:
        BuildError: the mesh has several ranks along ``pp`` (use ``slapo.build``), or parameters have no values.
    """
    from slapo_deepspeed.engine import prepared

    return prepared(sch)
