"""What happens on a rank of a trial."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

import slapo_core as slapo
from slapo_tune.trials.run import Run

if TYPE_CHECKING:
    from slapo_core.spec.sampler import Point
    from slapo_tune.study import Study

__all__ = ["try_point"]


def try_point(study: Study, point: Point) -> tuple[float, dict[str, Any]]:
    """The value of a point, and what was measured."""
    with torch.device("meta"):
        model = study.make_model()
    mesh = dict(study.mesh(point)) if study.mesh is not None else None
    batch = study.batch(point) if study.batch is not None else None
    schedule = slapo.create_schedule(model, mesh=mesh, example_inputs=batch)
    study.schedule(schedule, point)
    run = Run(study, point, schedule, schedule.mesh.global_rank if schedule.mesh else 0)
    value = study.evaluate(run) if study.evaluate is not None else train(run, batch)
    return float(value), run.measured


def train(run: Run, batch: Any) -> float:
    """The default ``evaluate``: samples per second over all replicas."""
    study = run.study
    engine = slapo.build(run.schedule, target=study.target, optimizer=study.optimizer, loss=study.loss)
    seconds = []
    for _ in range(study.warmup + study.steps):
        before = time.perf_counter()
        engine.train_step(batch)
        seconds.append(time.perf_counter() - before)
    run.measured["time"] = sorted(seconds[study.warmup :])[study.steps // 2]
    first = next(tensor for tensor in torch.utils._pytree.tree_leaves(batch) if isinstance(tensor, torch.Tensor))
    replicas = run.schedule.mesh.size("dp") if run.schedule.mesh else 1
    return float(first.shape[0] * replicas / run.measured["time"])
