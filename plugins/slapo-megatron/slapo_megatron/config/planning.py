"""What a plan says, line by line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from slapo_core.spec.dialect import boundaries, topology
from slapo_megatron.config.facts import trains
from slapo_megatron.config.fields import FIELDS
from slapo_megatron.groups.order import order_of

if TYPE_CHECKING:
    from slapo_core.spec.mesh import Mesh
    from slapo_core.spec.request import ScheduledModel
    from slapo_megatron.config.facts import StagesOf

__all__ = ["steps_of"]

_NAMES = {
    "tp": "tensor model parallel",
    "pp": "pipeline model parallel",
}


def steps_of(schedule: ScheduledModel, options: Mapping[str, Any], stages: StagesOf) -> Iterator[str]:
    """The lines of the plan: sizes and ranks, groups, buckets and optimizer, what crosses stages, the options.

    Args:
        schedule: what is built.
        options: as :func:`slapo_megatron.config.filling.filled` made them.
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


def _of_pipeline(schedule: ScheduledModel, stages: StagesOf, pp: int) -> Iterator[str]:
    count = stages.count
    if count is None:
        yield f"a pipeline over {pp} ranks: 1F1B with one stage a rank, interleaved 1F1B with several"
    elif count == pp:
        yield f"a pipeline over {pp} ranks, a stage on each: 1F1B"
    else:
        yield f"a pipeline over {pp} ranks, {count / pp:g} stages on each, in turn: interleaved 1F1B"
    yield from boundaries(schedule, stages.ask)
    yield "  packed into one tensor for each micro-batch: floats together, everything else bit by bit"


def _replicas(mesh: Mesh | None) -> int:
    return mesh.size("dp") if mesh is not None else 1
