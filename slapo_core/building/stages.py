"""Pipeline stages of a model that is built: asked for on its example inputs first, and for every form of a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slapo_core.errors import ArgumentError, BuildError, HookError, TraceError
from slapo_core.pipeline.batches import InputSignature, bound_batch, in_mode
from slapo_core.pipeline.stages import Staged, needing, staged
from slapo_core.tracing import state

if TYPE_CHECKING:
    from slapo_core.building.arguments import Arguments
    from slapo_core.building.target import Target
    from slapo_core.schedule.schedule import Schedule
    from slapo_core.spec.dialect import Plan
    from slapo_core.spec.pipeline import Output

__all__ = ["Stages", "stages_of_build"]

Outputs = Sequence[str] | Callable[["Output"], Sequence[str]] | None
_FORMS = 16  # that are kept


class Stages:
    """The stages of a model whose tensors are in their places; those of the forms of batches that came last are kept.

    Args:
        schedule: what is built.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._modules = list(schedule.model.modules())
        self._parameters = list(schedule.model.parameters())
        self._kept: list[tuple[Any, InputSignature, Staged | None]] = []  # those that came last, last

    def of(
        self,
        inputs: Mapping[str, Any],
        *,
        training: bool,
        outputs: Outputs,
        batch_axes: Mapping[str, int | None] | None,
    ) -> Staged | None:
        """As :meth:`slapo_core.spec.request.BuildRequest.stages` says."""
        with in_mode(self._modules, training=training):
            form = InputSignature(inputs, [module.training for module in self._modules])
            if not form.is_plain:
                return ask(self._schedule, inputs, outputs, batch_axes)
            key = (
                [(parameter.requires_grad, parameter.dtype) for parameter in self._parameters],  # runtimes convert them
                outputs if outputs is None or callable(outputs) else tuple(outputs),
                dict(batch_axes or {}),
                state()[1:],  # autocast
            )
            known = next((one for one in reversed(self._kept) if one[0] == key and one[1] == form), None)
            if known is None:
                known = (key, form, ask(self._schedule, inputs, outputs, batch_axes))
            self._kept = [*[one for one in self._kept if one is not known][1 - _FORMS :], known]
        return known[2]


def stages_of_build(
    schedule: Schedule, arguments: Arguments, target: Target, plan: Plan
) -> tuple[Staged, tuple[int, ...]] | None:
    """The stages of a training step on the schedule's example inputs, and the rank along ``pp`` of each.

    Returns:
        None where there is one rank along ``pp``.

    Raises:
        BuildError: stages and mesh do not go together, there are no example inputs, or the dialect's answer is none.
        TraceError: the model cannot be cut there.
        HookError: the answer of a plugin cannot be right.
    """
    pp = schedule.mesh.size("pp") if schedule.mesh is not None else 1
    if pp == 1:
        _refuse_cut(schedule, arguments)
        return None
    if schedule.example_inputs is None:
        raise BuildError(
            f"mesh_dim 'pp' has {pp} ranks, and the schedule has no example inputs, on which the stages of the model "
            "are found",
            hint=f"create_schedule(model, mesh={schedule.mesh}, example_inputs=batch), a batch as train_step takes it",
        )
    inputs = bound_batch(schedule.model, schedule.example_inputs, for_loss=arguments.loss is not None)
    with in_mode(list(schedule.model.modules()), training=True):
        found = ask(schedule, inputs)
    if found is None:
        raise BuildError(
            f"mesh_dim 'pp' has {pp} ranks, and no step cuts the model into stages for them",
            hint='sch["encoder.layer.5"].pipeline_split() cuts it after that module',
        )
    stages = len(found.partition.stages)
    if stages % pp:
        fitting = ", ".join(str(number * pp) for number in range(1, 4))
        raise BuildError(
            f"the model is cut into {stages} stages ({_cuts(found)}), which cannot be divided over the {pp} ranks of "
            "mesh_dim 'pp'",
            hint=f"cut it into {fitting}, ... stages: one pipeline_split() less than stages",
        )
    return found, target.stage_ranks(plan, stages, pp)


def ask(
    schedule: Schedule,
    inputs: Mapping[str, Any],
    outputs: Outputs = None,
    batch_axes: Mapping[str, int | None] | None = None,
) -> Staged | None:
    """Ask the plugins; ``outputs`` may be a function of the model's output, as data."""
    found = staged(schedule, inputs, batch_axes=batch_axes)
    if found is None or outputs is None:
        return found
    return needing(schedule, found, outputs(found.partition.output) if callable(outputs) else outputs)


def _refuse_cut(schedule: Schedule, arguments: Arguments) -> None:
    """Refuse a model that is cut, where no ranks are there for the stages."""
    inputs: dict[str, Any] = {}
    if schedule.example_inputs is not None:
        with contextlib.suppress(ArgumentError):  # of no batch: nothing but a message depends on it here
            inputs = bound_batch(schedule.model, schedule.example_inputs, for_loss=arguments.loss is not None)
    found: Staged | None = None
    cause: Exception | None = None
    try:
        with in_mode(list(schedule.model.modules()), training=True):
            found = ask(schedule, inputs)
    except (TraceError, HookError) as error:  # who does not cut it answers None, whatever the inputs
        cause = error
    if found is None and cause is None:
        return
    what = f"into {len(found.partition.stages)} stages ({_cuts(found)})" if found is not None else "into stages"
    where = "the schedule has no mesh" if schedule.mesh is None else f"the mesh {schedule.mesh} has one rank along 'pp'"
    sizes = {**(schedule.mesh.sizes if schedule.mesh is not None else {}), "pp": 2}
    raise BuildError(
        f"the model is cut {what}, and {where}",
        hint=f"create_schedule(model, mesh={sizes}, example_inputs=batch), or leave out pipeline_split()",
    ) from cause


def _cuts(found: Staged) -> str:
    return "after " + ", ".join(f"'{stage.last}'" for stage in found.partition.stages[:-1])
