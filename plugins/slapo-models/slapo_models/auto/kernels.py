"""Kernels that pay: patterns that match in repeated blocks, kept where the estimated step is faster or smaller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core import create_schedule
from slapo_core.errors import ArgumentError, LaunchError, SlapoError
from slapo_core.internals import Internals
from slapo_estimate.depth import profile_step
from slapo_estimate.device import DEVICES, DeviceSpec, Link
from slapo_estimate.reduced_model import BlockKinds

if TYPE_CHECKING:
    import slapo_core as slapo
    from slapo_core.plugins import Registry
    from slapo_core.primitive import Primitive
    from slapo_estimate.block_profile import StepProfile

LEAST_GAIN = 0.005
"""Relative gain of time, or of saved activations, from which a kernel pays."""

CPU = DeviceSpec(
    "a CPU core (nominal)",
    {"float64": 5e10, "float32": 1e11, "bfloat16": 1e11, "float16": 1e11},
    bandwidth=2e10,
    launch=5e-6,
    links={"*": Link(bandwidth=1e10, latency=1e-5)},
)
"""A CPU that was not measured, for comparisons of one model with and without a kernel."""

_ASSUMING = frozenset({"fusion.causal_sdpa"})
"""Patterns whose kernel assumes what a recording cannot show, here that no batch has padding."""


@dataclass(frozen=True)
class Kernels:
    """Patterns to replace or fuse in repeated blocks, and patterns left, with the reasons.

    Args:
        chosen: name of a pattern -> why it pays.
        left: name of a pattern -> why it is left.
    """

    chosen: dict[str, str]
    left: dict[str, str]


def device_here() -> DeviceSpec:
    """Return the specification of this machine's first GPU; of a nominal CPU without one."""
    if not torch.cuda.is_available():
        return CPU
    name = torch.cuda.get_device_name(0).lower()
    return next((spec for key, spec in DEVICES.items() if key in name), DEVICES["a100"])


def paying_kernels(model: nn.Module, blocks: BlockKinds, batch: Any, device: DeviceSpec, loss: Any = None) -> Kernels:
    """Choose kernels by the estimated step of the model with few blocks, on one rank.

    Patterns with a replacement are tried first, then regions to fuse, each together with those chosen before.

    Args:
        model: the reference model; only read.
        blocks: its repeated blocks.
        batch: one micro-batch.
        device: by which time is estimated.
        loss: as for :func:`slapo_core.build`.

    Raises:
        LaunchError: the script calls this outside of ``if __name__ == "__main__":``.
    """
    chosen: dict[str, str] = {}
    left: dict[str, str] = {}

    def profile(names: Sequence[str]) -> StepProfile:
        def apply(sch: slapo.Schedule) -> None:
            matched = apply_kernels(sch, BlockKinds.of(sch.model), dict.fromkeys(names, ""))
            missing = [name for name in names if name not in matched]
            if missing:
                raise _NoMatchError(missing[0])

        return profile_step(model, blocks, apply, batch, mesh=None, device=device, optimizer=None, loss=loss)

    if not blocks.paths:
        return Kernels({}, {"all patterns": "the model has no repeated blocks"})
    try:
        best = profile(())
    except SlapoError as error:
        if isinstance(error, LaunchError) and "__main__" in (error.hint or ""):
            raise  # the process of the estimate runs the script, to its end if this is a note
        return Kernels({}, {"all patterns": f"the step cannot be estimated: {_line(error)}"})
    for name, has_replacement in _patterns(Internals(create_schedule(nn.Identity())).registry):
        if name in _ASSUMING:
            left[name] = "it assumes batches without padding"
            continue
        if not has_replacement and device.type != "cuda":
            left[name] = f"the estimate of {device.name} has no gain of fused regions"
            continue
        try:
            tried = profile([*chosen, name])
        except _NoMatchError:
            continue
        except SlapoError as error:
            left[name] = _line(error)
            continue
        time, saved = _gain(best.seconds, tried.seconds), _gain(_saved(best), _saved(tried))
        text = f"{100 * time:.1f} % less time of a block, {100 * saved:.1f} % less memory (estimated for {device.name})"
        if max(time, saved) >= LEAST_GAIN and min(time, saved) > -LEAST_GAIN:
            chosen[name], best = text, tried
        else:
            left[name] = f"it does not pay: {text}"
    return Kernels(chosen, left)


def apply_kernels(sch: slapo.Schedule, blocks: BlockKinds, names: dict[str, str]) -> set[str]:
    """Trace the blocks, and replace or fuse each pattern where it matches; return those that match in some block.

    Args:
        sch: the schedule.
        blocks: the repeated blocks of its model.
        names: names of patterns, with the reasons, which become notes of the steps.

    Raises:
        SlapoError: a block cannot be traced.
    """
    if not names:
        return set()
    internals, replaceable = Internals(sch), dict(_patterns(Internals(sch).registry))
    for pattern in names:
        if pattern not in replaceable:
            raise ArgumentError(f"no installed pattern has the name {pattern!r}", hint="slapo patterns list")

    def step(path: str, name: str, note: str, **arguments: Any) -> None:
        primitive: Primitive = internals.registry.load(name, "primitives")(**arguments)
        internals.apply(internals.node(path), primitive, note=note)

    traced = "its patterns are replaced by kernels"
    for path in blocks.paths:
        step(path, "graph.trace", traced, flatten=True)
    matched: set[str] = set()
    for pattern, reason in names.items():
        for path in blocks.paths:
            node: Any = internals.node(path)
            if not node.find(pattern):
                continue
            name = "core.replace" if replaceable[pattern] else "fusion.fuse"
            step(path, name, reason, match=pattern)
            matched.add(pattern)
    return matched


class _NoMatchError(Exception):
    """A pattern matches in no block."""


def _patterns(registry: Registry) -> list[tuple[str, bool]]:
    """Return the names of the installed patterns, those with a replacement first, and whether they have one."""
    found = [
        (name, getattr(registry.load(name, "patterns"), "replacement", None) is not None)
        for name in registry.names("patterns")
    ]
    return sorted(found, key=lambda one: not one[1])


def _saved(profile: StepProfile) -> float:
    return float(sum(each.saved for each in profile.plain.values()))


def _gain(before: float, after: float) -> float:
    return 1 - after / before if before else 0.0


def _line(error: SlapoError) -> str:
    return error.message.splitlines()[0]
