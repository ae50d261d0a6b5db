"""What `fit` says where nothing fits."""

from __future__ import annotations

from slapo_core.errors import FitError
from slapo_core.estimation.results import Estimate, Memory
from slapo_core.spec.sizes import format_bytes

__all__ = ["nothing_fits"]

_STATIC = ("parameters", "gradients", "optimizer", "buffers")


def nothing_fits(target: int, before: Estimate, least: Estimate, units: tuple[str, ...]) -> FitError:
    """The error; it says what holds the least peak that checkpointing reaches.

    Args:
        target: bytes.
        before: of the schedule as it is.
        least: of the set with the least peak.
        units: what could be checkpointed.
    """
    memory = least.memory
    what = "with the best of them checkpointed" if units else "and all that may be is checkpointed already"
    where = f"in the {memory.phase} of '{memory.module}'" if memory.module not in ("", "optimizer") else ""
    where = where or ("in the step of the optimiser" if memory.module == "optimizer" else f"in the {memory.phase}")
    return FitError(
        f"no choice of checkpoints fits {format_bytes(target)}: the least peak of a step is "
        f"{format_bytes(memory.total)} ({format_bytes(before.memory.total)} as the schedule is; {len(units)} modules "
        f"could be checkpointed, {what}). It is {where}, and holds {_shown(memory)}",
        least=memory.total,
        target=target,
        hint=_advice(memory, target),
    )


def _shown(memory: Memory) -> str:
    parts = {
        "parameters": memory.parameters,
        "buffers": memory.buffers,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "temporaries": memory.temporaries,
        "inputs": memory.inputs,
    }
    shown = sorted(((size, name) for name, size in parts.items() if size), reverse=True)
    return ", ".join(f"{format_bytes(size)} of {name}" for size, name in shown)


def _advice(memory: Memory, target: int) -> str:
    static = memory.parameters + memory.buffers + memory.gradients + memory.optimizer
    if static >= target:
        return (
            f"parameters, gradients and optimiser alone take {format_bytes(static)}, whatever the batch: shard them "
            "over more ranks of tp or pp, use a smaller dtype or an optimiser with less state"
        )
    return (
        f"{format_bytes(memory.total - static)} of it depend on the batch: a smaller one, or more micro-batches "
        "(accumulate=), more ranks of tp, or smaller modules in layers="
    )
