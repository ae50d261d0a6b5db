"""Checks of a whole schedule: complete before build, and the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from slapo_core.errors import BuildError, HookError
from slapo_core.primitive import Violation
from slapo_core.tree.render import describe
from slapo_runtime.ranks.rank_consistency import RankFact

if TYPE_CHECKING:
    from slapo_core.layout import Mesh
    from slapo_core.schedule.schedule import Schedule


def obligations(schedule: Schedule) -> tuple[Violation, ...]:
    """Yield every reason why the schedule certainly trains a model other than the reference model.

    Raises:
        HookError: a plugin's ``slapo_check`` raised, or gave something else than violations.
    """
    found: list[Violation] = []
    for distribution, answer in schedule.hooks.call_each("slapo_check", schedule=schedule):
        given = list(answer) if isinstance(answer, Iterable) and not isinstance(answer, str) else [answer]
        for item in given:
            if not isinstance(item, Violation):
                raise HookError(
                    f"hook slapo_check of {distribution} must yield Violation objects (got {item!r})",
                    plugin=distribution,
                    hint='yield slapo_core.Violation("reduction is missing", hint="the call to add")',
                )
        found += given
    return tuple(found)


def refuse_if_incomplete(schedule: Schedule, *, trains: bool = True) -> None:
    """Refuse a schedule that certainly trains another model; without ``trains``, one that computes another output.

    Raises:
        BuildError: every reason is given.
    """
    missing = [str(one) for one in obligations(schedule) if trains or not one.gradients_only]
    if missing:
        start = "the schedule is incomplete"
        lines = [f"{start}: {missing[0]}"] if len(missing) == 1 else [f"{start}:", *(f"  - {one}" for one in missing)]
        raise BuildError("\n".join(lines))


SAME_SCRIPT = "run the same script on the same installation on every rank"
"""Hint where ranks disagree about a schedule."""


def schedule_facts(schedule: Schedule) -> Iterator[RankFact]:
    """Yield versions, mesh, model, every step with its arguments and provider, and the active plugins."""
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
    """Return the sizes of a mesh, and its ranks where they are not in ascending order."""
    grid = mesh.device_mesh.mesh if mesh is not None and mesh.device_mesh is not None else None
    if grid is None or grid.flatten().tolist() == sorted(grid.flatten().tolist()):
        return str(mesh)
    return f"{mesh} of the ranks {grid.tolist()}"
