"""The steps after tensor parallelism in an automatic schedule: kernels, stages, checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.internals import Internals
from slapo_estimate.composition import balanced_cuts
from slapo_estimate.depth import profile_step
from slapo_estimate.fit import fit
from slapo_estimate.reduced_model import BlockKinds
from slapo_models.auto.kernels import apply_kernels, device_here, paying_kernels

if TYPE_CHECKING:
    import slapo_core as slapo

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-4)
"""The optimizer whose state counts where no other one is known."""


def finish(
    sch: slapo.Schedule,
    inputs: Any,
    *,
    split: Callable[[slapo.Schedule, Any], Any],
    memory: int | str | None,
    kernels: bool | Sequence[str],
) -> tuple[str, ...]:
    """Apply the other steps of :func:`slapo_models.auto`, after tensor parallelism.

    Args:
        sch: the schedule.
        inputs: one batch.
        split: applies the steps of tensor parallelism to a schedule with this batch.
        memory: bytes of a device; None checkpoints nothing.
        kernels: whether patterns are replaced where that pays on this machine's device; or names of patterns.

    Returns:
        what was left, with the reasons.

    Raises:
        FitError: no choice of checkpoints fits.
        SlapoError: a step is refused.
    """
    notes: list[str] = []
    with sch.reference() as model:
        blocks = BlockKinds.of(model)
        names = dict.fromkeys(kernels, "as asked for") if not isinstance(kernels, bool) else {}
        if kernels is True:
            found = paying_kernels(model, blocks, inputs, device_here())
            names = found.chosen
            notes += [f"left: {name}: {reason}" for name, reason in found.left.items()]
        cuts = _cuts(sch, model, blocks, inputs, names, split)
    apply_kernels(sch, blocks, names)
    for number in cuts:
        internals = Internals(sch)
        cut = internals.registry.load("pipeline.pipeline_split", "primitives")()
        internals.apply(internals.node(blocks.paths[number]), cut, note="stages of equal predicted time")
    if memory is not None:
        chosen = fit(sch, memory, inputs, optimizer=ADAMW)
        notes.append(str(chosen).splitlines()[0])
    return tuple(notes)


def _cuts(
    sch: slapo.Schedule,
    model: torch.nn.Module,
    blocks: BlockKinds,
    inputs: Any,
    names: dict[str, str],
    split: Callable[[slapo.Schedule, Any], Any],
) -> tuple[int, ...]:
    """Return the numbers of the blocks after which the mesh's stages are cut."""
    stages = sch.mesh.size("pp") if sch.mesh is not None else 1
    if sch.mesh is None or stages == 1 or len(blocks.paths) < stages:
        return ()

    def steps(reduced: slapo.Schedule) -> None:
        split(reduced, inputs)
        apply_kernels(reduced, BlockKinds.of(reduced.model), names)

    mesh = {"tp": sch.mesh.size("tp")}
    profile = profile_step(model, blocks, steps, inputs, mesh=mesh, device=device_here(), optimizer=None)
    return balanced_cuts(profile, blocks.kinds, stages)
