"""Megatron's process groups that break where a step of a pipeline fails, where they are this plugin's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slapo_megatron.groups.starting import anywhere, start

if TYPE_CHECKING:
    from slapo_core.spec.mesh import Mesh
    from slapo_core.spec.request import BuildRequest, OwnGroups
    from slapo_megatron.groups.starting import Lease

__all__ = ["started"]


def started(request: BuildRequest, mesh: Mesh, virtual: int | None) -> tuple[Lease, OwnGroups]:
    """Megatron's groups, and groups of the engine's own, with which they break.

    Connections break that were made together with the engine's own, so Megatron's groups are made anew for it. Those
    that the user's script has made, or that another open engine uses, stay: a rank that waits in one of them when
    another fails goes on waiting until the timeout of the group.

    Args:
        request: from ``build``.
        mesh: of the schedule.
        virtual: stages on each rank along ``pp``, where there are several.

    Raises:
        BuildError: as :func:`slapo_megatron.groups.starting.start` says.
    """
    leases: list[Lease] = []

    def others() -> list[object]:
        lease = start(mesh, virtual=virtual)
        if lease.is_ours and not lease.is_new and not anywhere(lease.is_shared, mesh):
            lease.spoil()
            lease.close()
            lease = start(mesh, virtual=virtual)
        leases.append(lease)
        return list(lease.groups) if lease.is_new else []

    groups = request.own_groups("pp", others=others)
    return leases[0], groups
