"""What is still missing in a schedule, as the plugins that it names say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from slapo_core.errors import BuildError, HookError
from slapo_core.spec.primitive import Violation

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule

__all__ = ["obligations", "refuse_if_incomplete", "sharded_mesh_dims", "unused_mesh_dims"]


def obligations(schedule: Schedule) -> tuple[Violation, ...]:
    """Every reason why the schedule, as it stands, certainly trains another model than the reference model.

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
                    hint='yield slapo_core.Violation("what is missing", hint="the call to add")',
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


def unused_mesh_dims(schedule: Schedule) -> tuple[str, ...]:
    """Name the mesh dimensions of several ranks that no step works along and no tensor is split over.

    Replicas (``dp``) and stages (``pp``), which the runtime uses, are left out.
    """
    sizes = schedule.mesh.sizes if schedule.mesh is not None else {}
    used = {"dp", "pp", *(getattr(record.primitive, "mesh_dim", None) for record in schedule.records)}
    used |= {*sharded_mesh_dims(schedule)}
    return tuple(mesh_dim for mesh_dim, size in sizes.items() if size > 1 and mesh_dim not in used)


def sharded_mesh_dims(schedule: Schedule) -> tuple[str, ...]:
    """Name the mesh dimensions of several ranks along which a tensor is a shard or a partial sum."""
    found: set[str] = set()
    for node in schedule.root.walk():
        for name in (*node.parameters, *node.buffers):
            layout = node.layout(name)
            found |= {*(mesh_dim for mesh_dim, _ in layout.shards()), *layout.partials()}
    sizes = schedule.mesh.sizes if schedule.mesh is not None else {}
    return tuple(mesh_dim for mesh_dim, size in sizes.items() if size > 1 and mesh_dim in found)
