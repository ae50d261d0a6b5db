"""What Megatron cannot honour of a schedule, whatever the options: Megatron is not needed to say it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from slapo_core import Violation
from slapo_megatron.groups.order import unfit

if TYPE_CHECKING:
    from slapo_core.spec.request import ScheduledModel

__all__ = ["violations"]


def violations(schedule: ScheduledModel) -> Iterator[Violation]:
    """Every reason why Megatron cannot run a schedule.

    Args:
        schedule: what is to be built.
    """
    mesh = schedule.mesh
    if mesh is None:
        yield from _alone()
        return
    reason = unfit(mesh)
    if reason is not None:
        yield reason
    yield from _steps(schedule)


def _alone() -> Iterator[Violation]:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        count = dist.get_world_size()
        yield Violation(
            f"the schedule has no mesh, and torch.distributed runs {count} processes, over which all of Megatron's "
            "groups lie",
            hint=f'create_schedule(model, mesh={{"dp": {count}}})',
        )


def _steps(schedule: ScheduledModel) -> Iterator[Violation]:
    """What works on other groups than those of ``tp`` and ``pp``."""
    mesh = schedule.mesh
    assert mesh is not None
    found = False
    for record in schedule.records:
        mesh_dim = getattr(record.primitive, "mesh_dim", None)
        if mesh_dim == "dp" and mesh.size(mesh_dim) > 1:
            found = True
            yield Violation(
                f"{record} works along mesh_dim '{mesh_dim}', whose ranks are replicas for Megatron: they have other "
                "samples, and average all gradients",
                hint='mesh_dim="tp"',
            )
    if found:
        return
    for node in schedule.root.walk():
        for name in node.parameters:
            layout = node.layout(name)
            for mesh_dim in {*(mesh_dim for mesh_dim, _ in layout.shards()), *layout.partials()} - {"tp"}:
                if mesh.size(mesh_dim) > 1:
                    yield Violation(
                        f"parameter '{f'{node.path}.{name}' if node.path else name}' lies as {layout} over mesh_dim "
                        f"'{mesh_dim}', and Megatron knows pieces of parameters over 'tp' only"
                    )
