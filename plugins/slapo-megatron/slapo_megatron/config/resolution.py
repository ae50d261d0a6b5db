"""Complete the user's options by the schedule, and list the lines of the plan."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from slapo_core import BuildError
from slapo_megatron.config.draft import Draft, Facts, StagesOf, trains
from slapo_megatron.config.field_types import CLASSES, field_types_of, megatron_class, read
from slapo_megatron.config.fields import FIELDS
from slapo_megatron.config.optimization import (
    fill_clipping,
    fill_optimizer,
    fill_precision,
    fill_replicas,
    fill_scheduler,
)
from slapo_megatron.config.sizes import check_sequence_parallel, fill_microbatches, fill_pipeline, fill_sizes
from slapo_megatron.groups.order import order_of
from slapo_runtime.planning import boundaries, checked_axes, topology

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_core.layout import Mesh
    from slapo_megatron.config.draft import StagesOf


def validate(draft: Draft, mesh: Mesh | None) -> None:
    """
    Args:
        draft: filled in.
        mesh: of the schedule.

    Raises:
        BuildError: what Megatron refuses, in its own words.
    """
    from slapo_megatron.model.assembly import transformer_config

    for option in CLASSES:
        if option == "scheduler":  # tried where it is filled in
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                megatron_class(option)(**draft.options[option])
                if option == "model_parallel_config":
                    transformer_config(draft.options, mesh)
        except Exception as error:  # its checks raise assertions, and whatever a wrong value leads to
            raise BuildError(f"Megatron refuses {option}: {_told(error)}") from error


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__


OPTIONS = (*FIELDS, "microbatches", "batch_axes")
"""What users give; a plan has `arguments`, those of ``build``, and `origins`, where values come from, besides."""


def filled(schedule: Schedule, options: Mapping[str, Any], stages: StagesOf | None = None) -> dict[str, Any]:
    """The options of the dialect, filled in; given them, it gives them again; pure.

    Args:
        schedule: to build.
        options: as the user gave them to ``build``, with the arguments of ``build``; or as an earlier call made them.
        stages: of the schedule, if already known.

    Returns:
        ``optimizer_config``, ``ddp_config``, ``model_parallel_config``, ``scheduler``: what Megatron's classes are
        given; ``microbatches``; ``batch_axes``; ``arguments``: those of ``build``; ``origins``: of a value
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
        owners = [option for option in FIELDS if name in field_types_of(option)]
        said = f"target 'megatron' has no option {name!r}; it has {', '.join(OPTIONS)}"
        if owners:
            raise BuildError(said, hint=f'{owners[0]}={{"{name}": {options[name]!r}}}')
        raise BuildError(said)
    for name in ("arguments", "origins"):
        if not isinstance(options.get(name) or {}, Mapping):
            raise BuildError(
                f"{name} is an entry of a plan of target 'megatron', not an option (got {options[name]!r})"
            )


_NAMES = {
    "tp": "tensor model parallel",
    "pp": "pipeline model parallel",
}


def steps_of(schedule: Schedule, options: Mapping[str, Any], stages: StagesOf) -> Iterator[str]:
    """The lines of the plan: sizes and ranks, groups, buckets and optimizer, what crosses stages, the options.

    Args:
        schedule: to build.
        options: as :func:`slapo_megatron.config.resolution.filled` made them.
        stages: of the schedule.
    """
    mesh = schedule.mesh
    yield f"the scheduled {type(schedule.model).__name__}, {len(schedule.records)} steps applied"
    yield from _of_groups(mesh)
    yield from _of_training(options, mesh)
    if mesh is not None and mesh.size("pp") > 1:
        yield from _of_pipeline(schedule, stages, mesh.size("pp"))
    yield "what Megatron is given:"
    origins = options["origins"]
    for option in FIELDS:
        for name, value in sorted(options[option].items()):
            why = origins.get(f"{option}.{name}")
            yield f"  {option}.{name}: {value!r}" + (f"  (filled in: {why})" if why is not None else "")


def _of_groups(mesh: Mesh | None) -> Iterator[str]:
    if mesh is None or mesh.world_size == 1:
        yield "Megatron's process groups: one rank in each, made here, or the script's own if it has made them before"
        return
    replicas = _replicas(mesh)
    along = [f"{name} (mesh_dim '{mesh_dim}', {mesh.size(mesh_dim)} ranks)" for mesh_dim, name in _NAMES.items()]
    shown = [line for mesh_dim, line in zip(_NAMES, along, strict=True) if mesh.size(mesh_dim) > 1]
    if replicas > 1:
        shown.append(f"data parallel (mesh_dim 'dp', {replicas} ranks)")
    yield f"Megatron's process groups: {'; '.join(shown)}"
    yield (
        f"  made here in order '{order_of(mesh)}', or the script's own if it has made them before, of the same ranks; "
        "they stay for the next engine"
    )
    yield f"ranks: {topology(mesh)}"
    if mesh.size("tp") > 1:
        yield "one random state for the ranks of mesh_dim 'tp': that of the first of them"


def _of_training(options: Mapping[str, Any], mesh: Mesh | None) -> Iterator[str]:
    optimizer, ddp = options["optimizer_config"], options["ddp_config"]
    replicas, count = _replicas(mesh), options["microbatches"]
    pp = mesh.size("pp") if mesh is not None else 1
    how = f"through {pp} ranks along mesh_dim 'pp'" if pp > 1 else "one after the other"
    on = f" on each of {replicas} replicas" if replicas > 1 else ""
    yield f"a step: {count} micro-batches{on}, {how}" if count > 1 or pp > 1 else f"a step: one batch{on}"
    for name in ("bf16", "fp16"):
        if optimizer.get(name):
            yield f"{name}: the model computes in it, the optimizer has main parameters in float32"
    has_factory = (options.get("arguments") or {}).get("has_optimizer")
    if not trains(options) and has_factory is False:
        yield "no optimizer: it only evaluates"
        return
    yield f"gradients: {_buckets(ddp, replicas)}"
    if has_factory:
        yield "optimizer: that of the factory given to build"
    elif optimizer.get("lr") is None:
        yield "optimizer: that of the factory given to build; without one the engine only evaluates"
    else:
        yield from _of_optimizer(options)
    if ddp.get("use_distributed_optimizer"):
        yield f"distributed optimizer: {replicas} replicas partition the state of the optimizer"
    largest = optimizer["clip_grad"]
    yield f"gradients are clipped to a norm of {largest:g} over all ranks" if largest else "gradients are not clipped"


def _of_optimizer(options: Mapping[str, Any]) -> Iterator[str]:
    optimizer, scheduler = options["optimizer_config"], options["scheduler"]
    yield f"optimizer: Megatron's {optimizer.get('optimizer', 'adam')}, lr {optimizer['lr']:g}"
    style = scheduler["lr_decay_style"]
    rate = f"{scheduler['max_lr']:g}" if style == "constant" else f"{style}, {scheduler['max_lr']:g} to "
    rate += "" if style == "constant" else f"{scheduler['min_lr']:g} in {scheduler['lr_decay_steps']} steps"
    if scheduler["lr_warmup_steps"]:
        rate += f", from {scheduler['init_lr']:g} in {scheduler['lr_warmup_steps']} steps of warm-up"
    decay = f"{scheduler['end_wd']:g}"
    if scheduler["wd_incr_style"] != "constant":
        decay = (
            f"{scheduler['start_wd']:g} to {decay}, {scheduler['wd_incr_style']} in {scheduler['wd_incr_steps']} steps"
        )
    yield f"scheduler: one step after each of the optimizer; rate {rate}; weight decay {decay}, not for biases and 1-D"


def _buckets(ddp: Mapping[str, Any], replicas: int) -> str:
    kind = "float32" if ddp.get("grad_reduce_in_fp32") else "the type of the parameters"
    if not ddp.get("overlap_grad_reduce"):
        return f"accumulated and averaged in {kind}, in one bucket after the backward pass"
    size = ddp.get("bucket_size") or max(40_000_000, 1_000_000 * replicas)
    buckets = f"{ddp['num_buckets']} buckets" if ddp.get("num_buckets") else f"buckets of {size} parameters"
    return f"accumulated and averaged in {kind}, {buckets} while the backward pass goes on"


def _of_pipeline(schedule: Schedule, stages: StagesOf, pp: int) -> Iterator[str]:
    count = stages.count
    if count is None:
        yield f"a pipeline over {pp} ranks: 1F1B with one stage a rank, interleaved 1F1B with several"
    elif count == pp:
        yield f"a pipeline over {pp} ranks, a stage on each: 1F1B"
    else:
        yield f"a pipeline over {pp} ranks, {count / pp:g} stages on each, alternating: interleaved 1F1B"
    yield from boundaries(schedule, stages.ask)
    yield "  packed into one tensor for each micro-batch: floats together, everything else bit by bit"


def _replicas(mesh: Mesh | None) -> int:
    return mesh.size("dp") if mesh is not None else 1
