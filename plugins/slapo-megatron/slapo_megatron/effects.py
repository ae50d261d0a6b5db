"""The effects of target ``"megatron"``: collectives that Megatron makes in a training step, for receipts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from slapo_core.effects import Collective
from slapo_runtime.planning import at_modules, stage_messages

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_core.effects import Effect

_OTHERWISE = ("reduce_scatter_with_fp32_accumulation", "use_custom_fsdp", "use_megatron_fsdp", "fp8_param_gather")
"""Fields of ``DistributedDataParallelConfig`` with other collectives."""


def effects_of(schedule: Schedule, options: Mapping[str, Any]) -> Iterator[Effect]:
    """Yield the messages of stages, the exchange of gradients, and the gathering of the distributed optimizer.

    Args:
        schedule: to build.
        options: of the plan.
    """
    mesh, ddp = schedule.mesh, options["ddp_config"]
    if mesh is None or mesh.is_abstract:
        return
    yield from stage_messages(mesh)
    trained = {name: one for name, one in schedule.model.named_parameters() if one.requires_grad}
    is_special = any(ddp.get(name) for name in _OTHERWISE) or ddp.get("num_distributed_optimizer_instances", 1) > 1
    if mesh.size("dp") == 1 or not trained or is_special:
        return
    is_cut, is_distributed = mesh.size("pp") > 1, ddp.get("use_distributed_optimizer")
    sizes = {name: 4 if ddp.get("grad_reduce_in_fp32") else one.element_size() for name, one in trained.items()}
    dtypes = {str(one.dtype).removeprefix("torch.") for one in trained.values()}
    dtype = "float32" if ddp.get("grad_reduce_in_fp32") else next(iter(dtypes)) if len(dtypes) == 1 else None
    found = [Collective("reduce_scatter" if is_distributed else "all_reduce", "dp", "step", dtype=dtype)]
    if not is_cut and not is_distributed:  # the buffers of the distributed optimizer are padded
        size = sum(one.numel() * sizes[name] for name, one in trained.items())
        found = [Collective("all_reduce", "dp", "step", dtype=dtype, bytes=size)]
    if is_distributed and not options["optimizer_config"].get("fp16"):  # a step that overflows gathers nothing
        found.append(Collective("all_gather", "dp", "step"))
    for effect in found:
        yield from at_modules(effect, trained) if is_cut else (effect,)
