"""``slapo explain``: what each step of a schedule changed."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from slapo_core.cli.arguments import AsJson, MeshSizes, StepsBatch
from slapo_core.cli.output import print_json
from slapo_core.cli.schedules import ModelName, ScheduleName, batch_for_steps, find_schedule

if TYPE_CHECKING:
    from slapo_core.primitive import Record
    from slapo_core.schedule.schedule import Schedule


def explain(
    schedule: ScheduleName,
    model: ModelName = None,
    mesh: MeshSizes = None,
    batch: StepsBatch = None,
    as_json: AsJson = False,
) -> None:
    """Explain a schedule: each step with its source line, and what it changed. Equal steps of layers are folded.

    The model is made on the meta device, without memory; nothing runs. Of a mesh, rank 0 is shown. Example:

    slapo explain bert:schedule --model bert:make_model --mesh tp=2
    """
    named = find_schedule(schedule, model=model, mesh=mesh)
    made = named.make(functools.partial(batch_for_steps, words=batch), on_meta=True)
    if as_json:
        from slapo_core.schedule.mesh_dims import unused_mesh_dims

        steps = [record_to_json(record) for record in made.records]
        print_json({**header(made), "steps": steps, "unused_mesh_dims": unused_mesh_dims(made)})
    else:
        print(made.explain())


def header(schedule: Schedule) -> dict[str, Any]:
    """Return model class and mesh as JSON."""
    kind = type(schedule.model)
    sizes = None if schedule.mesh is None else schedule.mesh.sizes
    return {"mesh": sizes, "model": f"{kind.__module__}.{kind.__qualname__}"}


def record_to_json(record: Record) -> dict[str, Any]:
    """Return a record as JSON, its call as text."""
    return {
        "call": str(record.primitive),
        "changes": list(record.edits),
        "distribution": record.distribution,
        "index": record.index,
        "location": record.location,
        "path": record.path,
        "primitive": record.name,
        "version": record.version,
    }
