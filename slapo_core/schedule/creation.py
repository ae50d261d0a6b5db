"""Make a schedule: `create_schedule` of a model, `replay` of saved steps."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from torch import nn

from slapo_core.errors import ArgumentError, ReplayError, SerializationError, SlapoError, warn_user
from slapo_core.layout import Mesh, declare_mesh
from slapo_core.primitive import Primitive
from slapo_core.schedule.records import fingerprint, load_document, primitive_from_json, uncovered
from slapo_core.schedule.schedule import Schedule
from slapo_core.schedule.scheduled_models import refuse_if_scheduled

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def create_schedule(
    model: nn.Module,
    *,
    mesh: Mapping[str, int] | DeviceMesh | Mesh | None = None,
    plugins: Sequence[str] = (),
    example_inputs: Any = None,
    rank: int = 0,
) -> Schedule:
    """Create the default schedule of a model: the model as it is, without steps.

    Args:
        model: any ``nn.Module``, on any device, ``meta`` included. It is changed in place by the steps, and put back
            by ``undo``.
        mesh: the device mesh, as ``{"dp": 2, "tp": 2}`` (outermost dimension first) or torch's ``DeviceMesh``. In a
            process without torch.distributed, a dictionary of several ranks makes an *abstract* mesh, as of ``rank``.
        plugins: distributions whose hooks are active from the start; others are once one of their primitives is
            applied.
        example_inputs: one batch, as ``verify`` takes it: a mapping, a tuple, or one argument.
        rank: on an abstract mesh, the global rank of this schedule.

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
    refuse_if_scheduled(model, schedule._core.tree.index.modules)
    return schedule


def replay(
    model: nn.Module | Schedule,
    document: Mapping[str, Any] | str | PathLike[str],
    *,
    mesh: Mapping[str, int] | DeviceMesh | Mesh | None = None,
    plugins: Sequence[str] = (),
    example_inputs: Any = None,
    rank: int = 0,
) -> Schedule:
    """Apply a saved schedule to another instance of the model, or add its steps to a schedule.

    Args:
        model: a fresh instance; or a schedule, which gets these steps behind its own, and has fixed the arguments
            below.
        document: what ``sch.to_json()`` or ``sch.document()`` gave, or the path of a file that holds it. A function
            in it is found by its name in a module that is imported already; replay imports none.
        mesh: as for :func:`create_schedule`; None takes the mesh that the schedule was saved with. Another world
            size is fine.
        plugins: as for :func:`create_schedule`.
        example_inputs: as for :func:`create_schedule`.
        rank: as for :func:`create_schedule`.

    A schedule that leaves out blocks of a deeper model than it was written for is replayed, with a warning that names
    them.

    Returns:
        the schedule.

    Raises:
        ReplayError: not a schedule, a primitive is not installed, or a step was refused; the model is as it was before.
        ArgumentError: a schedule, and an argument that it has fixed.
    """
    data = load_document(document)
    if isinstance(model, Schedule):
        if mesh is not None or example_inputs is not None or plugins or rank:
            raise ArgumentError(
                "mesh=, plugins=, example_inputs= and rank= are fixed by the schedule",
                hint="replay(sch, document)",
            )
        schedule = model
    else:
        schedule = create_schedule(
            model,
            mesh=mesh if mesh is not None else data.get("mesh"),
            plugins=plugins,
            example_inputs=example_inputs,
            rank=rank,
        )
    before = len(schedule.records)
    saved = data["records"]
    values = [_primitive_of(schedule, number, record, data) for number, record in enumerate(saved, start=1)]
    blocks = data.get("blocks")
    paths = [record["path"] for record in saved]
    missing = list(uncovered(schedule.model, paths, blocks if isinstance(blocks, Mapping) else {}))
    try:
        for number, (record, primitive) in enumerate(zip(saved, values, strict=True), start=1):
            try:
                node = schedule._core.tree.node(record["path"])
                schedule._core.apply_at(node, primitive, location=record.get("location") or None)
            except SlapoError as error:
                raise ReplayError(
                    f"step {number} of {len(saved)}, {primitive} at '{record['path']}', was refused: {error.message}",
                    path=record["path"],
                    hint=error.hint,
                ) from error
        with contextlib.suppress(SerializationError):  # a lambda in a step before these: not what was verified
            if "verified" in data and data["verified"] == fingerprint(schedule.document()):
                schedule._core.mark_verified()
        for line in missing:
            warn_user(f"{line}; give those their steps, or undo with sch.undo(to=0)")
    except BaseException:
        schedule.undo(to=before)
        raise
    return schedule


def _primitive_of(schedule: Schedule, number: int, record: Mapping[str, Any], document: Mapping[str, Any]) -> Primitive:
    try:
        cls: type[Primitive] = schedule._core.registry.load(record["primitive"], "primitives")
        return primitive_from_json(cls, record["arguments"], document=document, registry=schedule._core.registry)
    except SlapoError as error:
        saved_with = f" (saved with {record.get('distribution')} {record.get('version')})"
        raise ReplayError(
            f"step {number}, {record['primitive']}{saved_with}, cannot be replayed: {error.message}",
            path=record["path"],
            hint=error.hint,
        ) from error
