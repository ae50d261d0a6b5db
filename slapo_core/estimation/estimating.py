"""`estimate`: memory, communication and time of a training step, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.estimation.child import Request, estimate_rank
from slapo_core.estimation.results import Estimate
from slapo_core.estimation.source import Source
from slapo_core.ranks.launcher import run_process
from slapo_core.spec.device import DeviceSpec
from slapo_core.verification.dry import sent

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule

__all__ = ["estimate", "estimate_source"]


def estimate(
    sch: Schedule,
    example_inputs: Any = None,
    *,
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
    mesh: Mapping[str, int] | None = None,
    rank: int | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    device: DeviceSpec | None = None,
    timeout: float = 600.0,
) -> Estimate:
    """Predict memory, communication and time of a training step, for a declared mesh of any size, on one CPU process.

    Args:
        sch: the schedule; it is only read.
        example_inputs: one batch, as ``train_step`` takes it; its tensors may be on the meta device. Default: those of
            the schedule.
        optimizer: as for :func:`slapo_core.build`; None for none.
        mesh: sizes; default: the schedule's own.
        rank: one global rank; default: one of each kind of rank.
        loss: as for :func:`slapo_core.build`.
        device: whose numbers the time is predicted with; None predicts no time.
        timeout: seconds for each kind of rank.
    """
    sizes = mesh if mesh is not None else sch.mesh.sizes if sch.mesh is not None else None
    batch = sch.example_inputs if example_inputs is None else example_inputs
    return estimate_source(
        sent(sch), batch, mesh=sizes, rank=rank, optimizer=optimizer, loss=loss, device=device, timeout=timeout
    )


def estimate_source(
    source: Source,
    batch: Any,
    *,
    mesh: Mapping[str, int] | None = None,
    rank: int | None = None,
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    device: DeviceSpec | None = None,
    timeout: float = 600.0,
    observer: Any = None,
) -> Estimate:
    """As :func:`slapo_core.estimate`, of a schedule that other processes make."""
    request = Request(source, mesh, rank or 0, (rank or 0,), batch, optimizer, loss, device, observer)
    kinds = (run_process(estimate_rank, request, timeout=timeout),)
    return Estimate(dict(mesh or {}), kinds)
