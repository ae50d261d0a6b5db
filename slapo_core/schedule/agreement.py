"""What all ranks must say alike about a schedule, before it is built or verified."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from slapo_core.ranks.rank_consistency import RankFact, describe

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule
    from slapo_core.spec.mesh import Mesh

__all__ = ["SAME_SCRIPT", "schedule_facts"]

SAME_SCRIPT = "run the same script on the same installation on every rank"
"""The way out where ranks disagree about a schedule."""


def schedule_facts(schedule: Schedule) -> Iterator[RankFact]:
    """Versions, mesh, model, every step with its arguments and its provider, and the active plugins."""
    yield RankFact("the version of slapo-core", str(schedule.registry.core_version))
    yield RankFact("the version of torch", torch.__version__)
    yield RankFact("the mesh", _mesh(schedule.mesh))
    yield RankFact("the model", f"{type(schedule.model).__module__}.{type(schedule.model).__qualname__}")
    for record in schedule.records:
        arguments = ", ".join(f"{key}={describe(value)}" for key, value in record.primitive.arguments().items())
        where = f"'{record.path}'" if record.path else "the root"
        provider = f"{record.distribution} {record.version}"
        yield RankFact(f"step {record.index}", f"{record.name}({arguments}) at {where}, from {provider}")
    labels = {plugin.name: plugin.label for plugin in schedule.registry.plugins}
    active = ", ".join(labels.get(name, name) for name in schedule.hooks.active)
    yield RankFact("the active plugins", active or "none")


def _mesh(mesh: Mesh | None) -> str:
    """Its sizes, and the ranks where they do not stand in their usual order."""
    grid = mesh.device_mesh.mesh if mesh is not None and mesh.device_mesh is not None else None
    if grid is None or grid.flatten().tolist() == sorted(grid.flatten().tolist()):
        return str(mesh)
    return f"{mesh} of the ranks {grid.tolist()}"
