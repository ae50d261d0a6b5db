"""Simulate a training step of few blocks, for models of any depth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from slapo_core import create_schedule
from slapo_core.errors import ArgumentError
from slapo_core.internals import Checkpoint, Internals
from slapo_estimate.block_profile import ProfileBlocks, StepProfile
from slapo_estimate.estimates import estimate_source
from slapo_estimate.private import tree_leaves
from slapo_estimate.reduced_model import KEPT, BlockKinds, reduce_model
from slapo_estimate.source import move_to_meta, of_schedule
from slapo_runtime.batches import micro_batches

if TYPE_CHECKING:
    from torch import nn

    from slapo_core import Schedule
    from slapo_estimate.device import DeviceSpec


def profile_step(
    model: nn.Module,
    blocks: BlockKinds,
    apply: Callable[[Schedule], Any],
    batch: Any,
    *,
    mesh: Mapping[str, int] | None,
    device: DeviceSpec,
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    timeout: float = 600.0,
    kept: int | None = KEPT,
) -> StepProfile:
    """Simulate a training step of a model with two blocks of each kind, the first of them checkpointed.

    Args:
        model: only read.
        blocks: its blocks.
        apply: applies steps to the schedule of the reduced model.
        batch: one micro-batch.
        mesh: sizes, without replicas and stages.
        device: by which time is predicted.
        optimizer: as for :func:`slapo_core.build`.
        loss: as for :func:`slapo_core.build`.
        timeout: seconds.
        kept: blocks of each kind; None for all.

    Raises:
        EstimateError: the model does not run with fewer blocks, or see :func:`slapo_core.estimate`.
        SlapoError: see :func:`slapo_core.estimate`; or raised by ``apply``.
    """
    reduced = reduce_model(model, blocks, kept)
    move_to_meta([reduced.model])
    schedule = create_schedule(reduced.model, mesh=dict(mesh) if mesh else None, example_inputs=batch)
    apply(schedule)
    checkpointed = reduced.checkpointed()
    for path in checkpointed:
        Internals(schedule).apply(Internals(schedule).node(path), Checkpoint())
    observer = ProfileBlocks(reduced.paths, reduced.kinds, checkpointed, device.launch, samples_of(batch))
    found = estimate_source(
        of_schedule(schedule),
        batch,
        mesh=mesh or None,
        rank=0,
        optimizer=optimizer,
        loss=loss,
        device=device,
        timeout=timeout,
        observer=observer,
    )
    profile = found.kinds[0].observed
    assert isinstance(profile, StepProfile)
    return profile


def samples_of(batch: Any) -> int:
    """Return the number of samples of a batch: the first axis of its first tensor with axes.

    Raises:
        ArgumentError: there is no such tensor.
    """
    sizes = (leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim())
    found = next(sizes, 0)
    if not found:
        raise ArgumentError(
            "the batch has no samples: none of its tensors has a first axis",
            hint='{"input_ids": ids, "labels": ids}, with the samples of all replicas along the first axis',
        )
    return int(found)


def first_samples(batch: Any, samples: int) -> Any:
    """Return the first samples of a batch, as a micro-batch of ``build`` has them.

    Args:
        batch: the batch.
        samples: their number, which divides that of the batch.

    Raises:
        BuildError: the batch cannot be cut into such micro-batches.
    """
    return micro_batches(batch, samples_of(batch) // samples, option="microbatches")[0]


def run_stages(
    model: nn.Module,
    blocks: BlockKinds,
    apply: Callable[[Schedule], Any],
    batch: Any,
    *,
    tp: int,
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
) -> None:
    """Cut a reduced model after its first block, and simulate a step of two micro-batches on the first stage.

    Args:
        model: only read.
        blocks: its blocks.
        apply: applies steps to the schedule of the reduced model.
        batch: two micro-batches.
        tp: ranks along ``tp``.
        optimizer: as for :func:`slapo_core.build`.
        loss: as for :func:`slapo_core.build`.

    Raises:
        SlapoError: the model cannot be cut into stages there.
    """
    reduced = reduce_model(model, blocks)
    move_to_meta([reduced.model])
    mesh = {"pp": 2, "tp": tp}
    micro = first_samples(batch, samples_of(batch) // 2)
    schedule = create_schedule(reduced.model, mesh=mesh, example_inputs=micro)
    apply(schedule)
    node: Any = schedule[reduced.paths[0]]
    node.pipeline_split()
    estimate_source(of_schedule(schedule), batch, mesh=mesh, rank=0, optimizer=optimizer, loss=loss, microbatches=2)
