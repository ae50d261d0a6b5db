"""`Study`: everything that a search is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from slapo_core import DeviceSpec, Schedule
    from slapo_core.spec.sampler import Point
    from slapo_tune.space.symbols import Symbols
    from slapo_tune.trials.run import Run

__all__ = ["Study"]


@dataclass(frozen=True)
class Study:
    """A search; a file for ``slapo tune run`` has one at its top level, named ``study``.

    All functions are defined at the top level of a module: trials run in processes of their own, and get them by name.

    Args:
        make_model: gives the model; called under ``torch.device("meta")``.
        space: is given :class:`~slapo_tune.space.symbols.Symbols`; its choices are the points.
        schedule: ``schedule(sch, p)`` applies the primitives of point ``p`` to the default schedule.
        evaluate: ``evaluate(run)`` on every rank of a trial; gives what is maximised, e.g. samples per second. None
            trains on ``batch`` with ``optimizer`` by ``target``, and maximises samples per second of all replicas.
        world_size: ranks of a trial.
        mesh: the mesh of a point, e.g. ``lambda p: {"dp": 4 // p["tp"], "tp": p["tp"]}``; None for one rank.
        batch: one replica's batch at a point, as ``train_step`` takes it; what the estimate and the default
            ``evaluate`` run on.
        optimizer: as for ``slapo_core.build``.
        loss: as for ``slapo_core.build``.
        target: the dialect of the default ``evaluate``.
        memory: of a rank: bytes, or as in ``"70GiB"``; None for no limit.
        device: what the predicted time goes by; None predicts none.
        sampler: the name of an installed one.
        log: one line a trial is written there.
        timeout: seconds of a trial.
        warmup: steps of the default ``evaluate`` that are not measured.
        steps: those that are.
        trials: at most as many are started; None for as many as the sampler proposes.
        seed: of the sampler.
    """

    make_model: Callable[[], nn.Module]
    space: Callable[[Symbols], Any]
    schedule: Callable[[Schedule, Point], Any]
    evaluate: Callable[[Run], float] | None = None
    world_size: int = 1
    mesh: Callable[[Point], Mapping[str, int]] | None = None
    batch: Callable[[Point], Any] | None = None
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    target: str = "torch"
    memory: int | str | None = None
    device: DeviceSpec | None = None
    sampler: str = "frontier"
    log: str | Path = "study.jsonl"
    timeout: float = 300.0
    warmup: int = 2
    steps: int = 5
    trials: int | None = None
    seed: int = 0
