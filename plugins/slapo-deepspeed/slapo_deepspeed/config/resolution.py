"""Complete the user's configuration by the schedule, and list the lines of the plan."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import slapo_core
from slapo_core import BuildError
from slapo_deepspeed.config.draft import Draft, Facts, read
from slapo_deepspeed.config.refusals import refuse_auto, refuse_settings, refuse_unknown
from slapo_deepspeed.config.settings import (
    check_optimizer,
    fill_batch,
    fill_precision,
    fill_scheduler,
    leave_out_auto,
    optimizer_name,
)
from slapo_deepspeed.config.validation import validate
from slapo_runtime.planning import boundaries, checked_axes, topology

if TYPE_CHECKING:
    from slapo_core import Schedule

OPTIONS = ("config", "batch_axes")
"""What users give."""
NOTES = ("arguments", "origins")
"""Return the other entries of a plan: the arguments of ``build``, and the origins of values."""

_TESTED_WITH_ZERO = frozenset({"adagrad", "adam", "adamw", "lion"})
_PIPELINE = {
    "use_reentrant": "so that integers and booleans may cross stages",
    "pipe_partitioned": "tensors cross stages whole",
    "grad_partitioned": "gradients cross stages whole",
}


def filled(schedule: Schedule, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the dialect, filled in; given them, it gives them again; pure.

    Args:
        schedule: to build.
        options: as the user gave them to ``build``, with the arguments of ``build``; or as an earlier call made them.

    Returns:
        ``config``: DeepSpeed's configuration, whole; ``batch_axes``; ``arguments``: those of ``build``;
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
            raise BuildError(
                f"{name} is an entry of a plan of target 'deepspeed', not an option (got {options[name]!r})"
            )
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


_ZERO = {
    0: "without ZeRO: every replica holds parameters, gradients and optimizer state whole",
    1: "ZeRO-1: replicas partition the optimizer state",
    2: "ZeRO-2: replicas partition optimizer state and gradients",
    3: "ZeRO-3: replicas partition optimizer state, gradients and parameters",
}


def steps_of(schedule: Schedule, options: Mapping[str, Any]) -> Iterator[str]:
    """The lines of the plan: features, the topology, the filled-in configuration.

    Args:
        schedule: to build.
        options: as :func:`slapo_deepspeed.config.resolution.filled` made them.
    """
    config, origins, mesh = options["config"], options["origins"], schedule.mesh
    sizes = {name: mesh.size(name) if mesh is not None else 1 for name in ("dp", "pp", "tp")}
    yield f"the scheduled {type(schedule.model).__name__}, {len(schedule.records)} steps applied"
    stage = config["zero_optimization"]["stage"]
    over = f" over mesh_dim 'dp' ({sizes['dp']} ranks)" if sizes["dp"] > 1 else ", one replica"
    yield f"{_ZERO[stage]}{over}"
    if sizes["tp"] > 1:
        yield f"collectives over mesh_dim 'tp' ({sizes['tp']} ranks), as the steps say; DeepSpeed is told the groups"
        yield "one random state for the ranks of mesh_dim 'tp': that of the first of them"
    yield from _of_training(options, sizes)
    if sizes["pp"] > 1:
        has_loss = bool((options.get("arguments") or {}).get("has_loss"))
        yield from boundaries(schedule, lambda: slapo_core.stages(schedule, whole_output=has_loss))
    if mesh is not None and mesh.world_size > 1:
        yield f"ranks: {topology(mesh)}"
    yield "the configuration that DeepSpeed is given:"
    for key, value in _flat(config):
        why = f"  (filled in: {origins[key]})" if key in origins else ""
        yield f"  {key}: {json.dumps(value)}{why}"
    for key, why in sorted(origins.items()):
        if why.startswith("left out"):
            yield f"  {key} is {why}"


def _of_training(options: Mapping[str, Any], sizes: Mapping[str, int]) -> Iterator[str]:
    config = options["config"]
    micro, steps = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    how = f"through {sizes['pp']} ranks along mesh_dim 'pp', 1F1B" if sizes["pp"] > 1 else "one after the other"
    replicas = f" on each of {sizes['dp']} replicas" if sizes["dp"] > 1 else ""
    if steps > 1 or sizes["pp"] > 1:
        yield f"a step: {steps} micro-batches{replicas}, {how}; by the configuration of {micro} samples each"
    else:
        yield f"a step: one batch{replicas}; by the configuration of {micro} samples"
    for name in ("fp16", "bf16", "bfloat16", "torch_autocast"):
        if (config.get(name) or {}).get("enabled"):
            yield f"{name}, as the configuration says"
    for name in ("offload_optimizer", "offload_param"):
        if (config["zero_optimization"].get(name) or {}).get("device", "none") != "none":
            yield f"{name} to {config['zero_optimization'][name]['device']}"
    if "activation_checkpointing" in config:
        yield "activation_checkpointing is for models that call deepspeed.checkpointing: .checkpoint() steps recompute"
    has_factory = (options.get("arguments") or {}).get("has_optimizer")
    if "optimizer" in config:
        yield f"optimizer: {config['optimizer']['type']}, of the configuration"
    elif has_factory is None:
        yield "optimizer: that of the factory given to build; without one the engine only evaluates"
    else:
        yield "optimizer: that of the factory given to build" if has_factory else "no optimizer: it only evaluates"
    if "scheduler" in config:
        yield f"learning rate: {config['scheduler']['type']}, one step after each of the optimizer"
    largest = config["gradient_clipping"]
    yield f"gradients are clipped to a norm of {largest:g} over all ranks" if largest else "gradients are not clipped"


def _flat(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name in sorted(config):
        value, key = config[name], f"{before}{name}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{key}.")
        else:
            yield key, value
