"""The user's DeepSpeed configuration, with what the schedule decides filled in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slapo_core import BuildError
from slapo_core.spec.dialect import checked_axes
from slapo_deepspeed.config.batch import fill_batch
from slapo_deepspeed.config.draft import Draft
from slapo_deepspeed.config.facts import Facts
from slapo_deepspeed.config.optimizers import check_optimizer, optimizer_name
from slapo_deepspeed.config.reading import read
from slapo_deepspeed.config.refusing import refuse_auto, refuse_settings, refuse_unknown
from slapo_deepspeed.config.settings import fill_precision, fill_scheduler, leave_out_auto
from slapo_deepspeed.config.validating import validate

if TYPE_CHECKING:
    from slapo_core.spec.request import ScheduledModel

__all__ = ["NOTES", "OPTIONS", "filled"]

OPTIONS = ("config", "batch_axes")
"""What users give."""
NOTES = ("arguments", "origins")
"""What a plan has besides: the arguments of ``build``, and where values come from."""

_TESTED_WITH_ZERO = frozenset({"adagrad", "adam", "adamw", "lion"})
_PIPELINE = {
    "use_reentrant": "so that integers and booleans may cross stages",
    "pipe_partitioned": "tensors cross stages whole",
    "grad_partitioned": "gradients cross stages whole",
}


def filled(schedule: ScheduledModel, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the dialect, filled in; given them, it gives them again; pure.

    Args:
        schedule: what is built.
        options: as the user gave them to ``build``, with the arguments of ``build``; or as an earlier call made them.

    Returns:
        ``config``: DeepSpeed's configuration, whole; ``batch_axes``; ``arguments``: what the user gave to ``build``;
        ``origins``: key of a value that was filled in -> why.

    Raises:
        BuildError: an option that there is none, a bad value, or one that contradicts the schedule.
    """
    for name in sorted(set(options) - {*OPTIONS, *NOTES}):
        raise BuildError(
            f"target 'deepspeed' has no option {name!r}; it has {', '.join(OPTIONS)}",
            hint=f'what DeepSpeed itself takes goes into config={{"{name}": ...}}',
        )
    for name in NOTES:
        if not isinstance(options.get(name) or {}, Mapping):
            raise BuildError(f"{name} is what a plan of target 'deepspeed' says, and no option (got {options[name]!r})")
    axes = checked_axes(options.get("batch_axes"))
    config, source = read(options.get("config"))
    refuse_unknown(config, source)
    config = {key: value for key, value in config.items() if value is not None}  # null: nothing is given
    facts = Facts.of(schedule, {**options, "batch_axes": axes})
    draft = Draft(config, source, facts, dict(options.get("origins") or {}))
    fill_precision(draft)
    _fill_zero(draft)
    refuse_settings(draft)
    refuse_auto(draft)
    leave_out_auto(draft)
    fill_batch(draft)
    _fill_clipping(draft)
    _fill_pipeline(draft)
    _leave_out_tensor_parallel(draft)
    check_optimizer(draft)
    _fill_zero_without_optimizer(draft)
    fill_scheduler(draft)
    _fill_optimizer_settings(draft)
    validate(draft)
    made = {"config": draft.config, "batch_axes": axes, "origins": draft.origins}
    return made | ({"arguments": dict(options["arguments"])} if options.get("arguments") else {})


def _fill_zero(draft: Draft) -> None:
    if isinstance(draft.config.get("zero_optimization"), bool):
        raise BuildError(
            f"{draft.source.of('zero_optimization')} must be an object (got {draft.config['zero_optimization']})",
            hint='"zero_optimization": {"stage": 1}',
        )
    if draft.get("zero_optimization.stage") is None:
        if draft.facts.pp > 1:
            draft.fill("zero_optimization.stage", 1, "with a pipeline; ZeRO-1 is the most that one runs with")
        elif draft.get("fp16.enabled"):
            draft.fill("zero_optimization.stage", 1, "with fp16; without ZeRO, DeepSpeed does not scale the loss")
        else:
            draft.fill("zero_optimization.stage", 0, "DeepSpeed's default")


def _fill_zero_without_optimizer(draft: Draft) -> None:
    stage = draft.get("zero_optimization.stage")
    if draft.facts.has_optimizer is False and "optimizer" not in draft.config and stage in (1, 2):
        why = f"instead of {stage}: without an optimizer the engine only evaluates, and nothing is partitioned"
        draft.fill("zero_optimization.stage", 0, why)


def _fill_clipping(draft: Draft) -> None:
    asked, given = draft.facts.max_grad_norm, draft.get("gradient_clipping")
    if given is not None and (isinstance(given, bool) or not isinstance(given, (int, float)) or not given >= 0):
        raise BuildError(
            f"{draft.source.of('gradient_clipping')} must be a number, 0 does not clip (got {given!r})",
            hint='"gradient_clipping": 1.0',
        )
    if given is None and asked is None:
        draft.fill("gradient_clipping", 0.0, "no max_grad_norm: nothing is clipped (DeepSpeed's default is 1.0)")
    elif given is None and asked is not None:
        draft.fill("gradient_clipping", float(asked), f"max_grad_norm={asked}")
    elif asked is not None and given is not None and float(given) != float(asked):
        raise BuildError(
            f"{draft.source.of('gradient_clipping')} is {given}, but build(max_grad_norm={asked})",
            hint="say it once: they are the same number",
        )


def _fill_pipeline(draft: Draft) -> None:
    if draft.facts.pp == 1:
        return
    for name, why in _PIPELINE.items():
        if draft.get(f"pipeline.{name}") is None:
            draft.fill(f"pipeline.{name}", False, why)


def _leave_out_tensor_parallel(draft: Draft) -> None:
    if "tensor_parallel" in draft.config:
        draft.leave_out("tensor_parallel", "the steps of the schedule split the model")


def _fill_optimizer_settings(draft: Draft) -> None:
    name, stage = optimizer_name(draft.config), draft.get("zero_optimization.stage")
    if stage and name not in _TESTED_WITH_ZERO and draft.get("zero_allow_untested_optimizer") is None:
        which = "all but Adam, AdamW and Adagrad of torch" if name is None else repr(name)
        why = f"DeepSpeed asks for it with ZeRO and {which}"
        draft.fill("zero_allow_untested_optimizer", True, why)
    offloads = draft.get("zero_optimization.offload_optimizer.device") not in (None, "none")
    if offloads and name is None and draft.get("zero_force_ds_cpu_optimizer") is None:
        draft.fill("zero_force_ds_cpu_optimizer", False, "a factory makes the optimizer whose state is offloaded")
