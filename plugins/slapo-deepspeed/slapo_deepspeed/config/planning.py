"""What a plan says, line by line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import slapo_core
from slapo_core.spec.dialect import boundaries, topology

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_core.spec.request import ScheduledModel

__all__ = ["steps_of"]

_ZERO = {
    0: "without ZeRO: every replica holds parameters, gradients and optimizer state whole",
    1: "ZeRO-1: replicas partition the optimizer state",
    2: "ZeRO-2: replicas partition optimizer state and gradients",
    3: "ZeRO-3: replicas partition optimizer state, gradients and parameters",
}


def steps_of(schedule: ScheduledModel, options: Mapping[str, Any]) -> Iterator[str]:
    """The lines of the plan: features, the topology, the filled-in configuration.

    Args:
        schedule: what is built.
        options: as :func:`slapo_deepspeed.config.filling.filled` made them.
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
        yield from boundaries(schedule, lambda: slapo_core.stages(cast("Schedule", schedule), whole_output=has_loss))
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
