"""Fill in what the schedule, the arguments of ``build``, and defaults decide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slapo_core import BuildError
from slapo_core.spec.dialect import checked_axes
from slapo_megatron.config.draft import Draft
from slapo_megatron.config.facts import Facts, StagesOf
from slapo_megatron.config.fields import FIELDS
from slapo_megatron.config.optimizing import fill_clipping, fill_optimizer, fill_replicas
from slapo_megatron.config.precision import fill_precision
from slapo_megatron.config.reading import read
from slapo_megatron.config.scheduling import fill_scheduler
from slapo_megatron.config.sizes import check_sequence_parallel, fill_microbatches, fill_pipeline, fill_sizes
from slapo_megatron.config.slots import slots
from slapo_megatron.config.validating import validate

if TYPE_CHECKING:
    from slapo_core.spec.request import ScheduledModel

__all__ = ["OPTIONS", "filled"]

OPTIONS = (*FIELDS, "microbatches", "batch_axes")
"""What users give; a plan has `arguments`, those of ``build``, and `origins`, where values come from, besides."""


def filled(schedule: ScheduledModel, options: Mapping[str, Any], stages: StagesOf | None = None) -> dict[str, Any]:
    """The options of the dialect, filled in; given them, it gives them again; pure.

    Args:
        schedule: what is built.
        options: as the user gave them to ``build``, with the arguments of ``build``; or as an earlier call made them.
        stages: of the schedule, where somebody else asks for them too.

    Returns:
        ``optimizer_config``, ``ddp_config``, ``model_parallel_config``, ``scheduler``: what Megatron's classes are
        given; ``microbatches``; ``batch_axes``; ``arguments``: what the user gave to ``build``; ``origins``: of a value
        that was filled in, e.g. ``"optimizer_config.clip_grad"`` -> why.

    Raises:
        BuildError: an option that there is none, a bad value, or one that contradicts the schedule.
    """
    _refuse_unknown(options)
    axes = checked_axes(options.get("batch_axes"))
    draft = Draft(
        {option: read(option, options.get(option)) for option in FIELDS},
        Facts.of(schedule, options, stages or StagesOf(schedule, options)),
        dict(options.get("origins") or {}),
        has_optimizer_config=options.get("optimizer_config") is not None,
    )
    fill_sizes(draft)
    check_sequence_parallel(draft)
    fill_precision(draft)
    fill_optimizer(draft)
    fill_clipping(draft)
    fill_replicas(draft)
    fill_pipeline(draft)
    microbatches = fill_microbatches(draft, options.get("microbatches"))
    fill_scheduler(draft)
    validate(draft, schedule.mesh)
    made = {**draft.options, "microbatches": microbatches, "batch_axes": axes, "origins": draft.origins}
    return made | ({"arguments": dict(options["arguments"])} if options.get("arguments") else {})


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    for name in sorted(set(options) - {*OPTIONS, "arguments", "origins"}):
        owners = [option for option in FIELDS if name in slots(option)]
        said = f"target 'megatron' has no option {name!r}; it has {', '.join(OPTIONS)}"
        if owners:
            raise BuildError(said, hint=f'{owners[0]}={{"{name}": {options[name]!r}}}')
        raise BuildError(said)
    for name in ("arguments", "origins"):
        if not isinstance(options.get(name) or {}, Mapping):
            raise BuildError(f"{name} is what a plan of target 'megatron' says, and no option (got {options[name]!r})")
