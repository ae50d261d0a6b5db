"""`create_schedule`: the default schedule of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from slapo_core.errors import ArgumentError
from slapo_core.schedule.schedule import Schedule
from slapo_core.schedule.scheduled_models import refuse_if_scheduled
from slapo_core.spec.mesh import Mesh, declare_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["create_schedule"]


def create_schedule(
    model: nn.Module,
    *,
    mesh: Mapping[str, int] | DeviceMesh | Mesh | None = None,
    plugins: Sequence[str] = (),
    example_inputs: Any = None,
    rank: int = 0,
) -> Schedule:
    """The default schedule of a model: the model as it is.

    Args:
        model: any ``nn.Module``, on any device, ``meta`` included. It is changed in place by the steps, and put back
            by ``undo``.
        mesh: the device mesh, as ``{"dp": 2, "tp": 2}`` (outermost dimension first) or torch's ``DeviceMesh``. In a
            process without torch.distributed, a dictionary of several ranks makes an *abstract* mesh for ``rank``.
        plugins: distributions whose hooks are active from the start; others are once one of their primitives is
            applied.
        example_inputs: one batch, as ``verify`` takes it: a mapping, a tuple, or one argument.
        rank: on an abstract mesh, this process's global rank.

    Raises:
        ArgumentError: ``model`` is not a module; it, a part of it, or a model that it is a part or a copy of carries
            the steps of another schedule; or ``plugins`` is one string.
        PluginError: one of ``plugins`` is not installed, or not usable.
        MeshError: the mesh does not fit.

    Source: paper section 3.1, ``slapo.create_schedule``.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"model must be a torch.nn.Module (got {type(model).__name__})", hint="create_schedule(MyModel())"
        )
    if isinstance(plugins, str):
        raise ArgumentError(
            f"plugins must be a sequence of distributions (got {plugins!r})", hint=f"plugins=[{plugins!r}]"
        )
    schedule = Schedule(
        model,
        mesh=declare_mesh(mesh, rank=rank),
        plugins=plugins,
        example_inputs=example_inputs,
        guarded=True,
    )
    refuse_if_scheduled(model, schedule.tree.index.modules)
    return schedule
