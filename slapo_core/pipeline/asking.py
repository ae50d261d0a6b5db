"""The stages of a schedule, for scripts and plugins that look at them: as ``build`` asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slapo_core.errors import ArgumentError
from slapo_core.pipeline.binding import bound_batch
from slapo_core.pipeline.modes import in_mode
from slapo_core.pipeline.staged import needing, staged

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule
    from slapo_core.spec.pipeline import Liveness, Partition

__all__ = ["Asked", "stages"]


@dataclass(frozen=True)
class Asked:
    """What the plugins answered.

    Args:
        partition: the stages.
        liveness: what each of them sends to the next.
        inputs: the batch that they were made for: the arguments of the model's forward, by parameter.
    """

    partition: Partition
    liveness: Liveness
    inputs: Mapping[str, Any]


def stages(schedule: Schedule, batch: Any = None, *, whole_output: bool = False) -> Asked:
    """The stages into which the steps of a schedule cut its model, and what passes between them.

    They are those of a training step: where every module is in evaluation mode, they are asked for in training mode.

    Args:
        schedule: with cuts.
        batch: what they are made for, as ``train_step`` takes it; None takes the schedule's example inputs.
        whole_output: whether the last stage needs the whole output, as for ``build(loss=...)``. Without it, it needs
            the loss, where the model computes one.

    Returns:
        an object with ``partition``, ``liveness`` and ``inputs``; see `slapo_core.spec.pipeline`.

    Raises:
        ArgumentError: there is no batch, or no step cuts the model.
        TraceError: it cannot be cut there.
        HookError: the answer of a plugin cannot be right.
    """
    batch = schedule.example_inputs if batch is None else batch
    if batch is None:
        raise ArgumentError(
            "stages are made for one form of a batch: none was given, and the schedule has no example inputs",
            hint="stages(sch, {'input_ids': ids}), or create_schedule(model, example_inputs={'input_ids': ids})",
        )
    inputs = bound_batch(schedule.model, batch, for_loss=whole_output)
    with in_mode(list(schedule.model.modules()), training=True):
        found = staged(schedule, inputs)
        if found is not None and not whole_output and found.partition.output.loss is not None:
            found = needing(schedule, found, (found.partition.output.loss,))
    if found is None:
        raise ArgumentError(
            "no step cuts this model into stages", hint='sch["encoder.layer.5"].pipeline_split() cuts after that module'
        )
    return Asked(found.partition, found.liveness, inputs)
