"""The mesh dimensions that the steps of a schedule use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule


def unused_mesh_dims(schedule: Schedule) -> tuple[str, ...]:
    """Name the mesh dimensions of several ranks that no step and no tensor uses.

    Replicas (``dp``) and stages (``pp``), which the runtime uses, are left out.
    """
    sizes = schedule.mesh.sizes if schedule.mesh is not None else {}
    used = {"dp_replicate", "dp", "pp", *(getattr(record.primitive, "mesh_dim", None) for record in schedule.records)}
    used |= {*sharded_mesh_dims(schedule)}
    return tuple(mesh_dim for mesh_dim, size in sizes.items() if size > 1 and mesh_dim not in used)


def sharded_mesh_dims(schedule: Schedule) -> tuple[str, ...]:
    """Name the mesh dimensions of several ranks with shards or partial values."""
    found: set[str] = set()
    for node in schedule.root.walk():
        for name in (*node.parameters, *node.buffers):
            layout = node.layout(name)
            found |= {*(mesh_dim for mesh_dim, _ in layout.shards()), *layout.partials()}
    sizes = schedule.mesh.sizes if schedule.mesh is not None else {}
    return tuple(mesh_dim for mesh_dim, size in sizes.items() if size > 1 and mesh_dim in found)
