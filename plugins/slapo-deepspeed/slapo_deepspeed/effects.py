"""The effects of target ``"deepspeed"``: collectives that DeepSpeed makes in a training step, for receipts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from slapo_core.effects import Collective
from slapo_runtime.planning import ScheduleFacts, at_modules, stage_messages

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_core.effects import Effect

_OTHERWISE = ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients", "mics_shard_size")
"""Keys of ``zero_optimization`` with other collectives."""
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "bfloat16": "bfloat16"}


def effects_of(schedule: Schedule, options: Mapping[str, Any]) -> Iterator[Effect]:
    """Yield the messages of stages, the exchange of gradients, and the gathering of what ZeRO partitions.

    Args:
        schedule: to build.
        options: of the plan.
    """
    mesh, config = schedule.mesh, options["config"]
    if mesh is None or mesh.is_abstract:
        return
    yield from stage_messages(mesh, over="_".join(name for name, size in mesh.sizes.items() if size > 1))
    zero = config.get("zero_optimization") or {}
    if mesh.size("dp") == 1 or any(zero.get(name) for name in _OTHERWISE):
        return
    facts, is_cut = ScheduleFacts.of(schedule, options), mesh.size("pp") > 1
    low = next((dtype for name, dtype in _DTYPES.items() if (config.get(name) or {}).get("enabled")), None)
    skips = low == "float16"  # a step that overflows gathers nothing
    found = []
    if (kind := _reduction(zero)) is not None:
        found.append(Collective(kind, "dp", "step", dtype=None if is_cut else _reduced(config, facts, low)))
    if zero.get("stage", 0) and zero.get("allgather_partitions", True) and not skips:
        found.append(Collective("all_gather", "dp", "step"))
    trained = [name for name, one in schedule.model.named_parameters() if one.requires_grad]
    for effect in found:
        yield from at_modules(effect, trained) if is_cut else (effect,)


def _reduction(zero: Mapping[str, Any]) -> str | None:
    """Return the kind of collective that reduces gradients; None where options decide otherwise."""
    stage, scatters = zero.get("stage", 0), zero.get("reduce_scatter", True)
    if stage == 3:
        return "reduce_scatter" if scatters else None
    return "all_reduce" if not stage or zero.get("use_multi_rank_bucket_allreduce", True) else None


def _reduced(config: Mapping[str, Any], facts: ScheduleFacts, low: str | None) -> str | None:
    """Return the type in which gradients are reduced, where the configuration and the model say one."""
    if any(config.get(name) for name in ("communication_data_type", "data_types", "torch_autocast")):
        return None
    return low if low is not None else "float32" if facts.dtypes == {"float32"} else None
