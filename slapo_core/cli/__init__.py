"""The command ``slapo``, and what commands share: arguments, schedules by name, output."""

from __future__ import annotations

from slapo_core.cli.arguments import (
    AsJson,
    ExampleBatch,
    MeshSizes,
    StepsBatch,
    batch_of,
    batch_option,
    call_function,
    find_function,
    mesh_of,
    progress,
)
from slapo_core.cli.output import print_json, print_table, table_lines
from slapo_core.cli.schedules import (
    ModelName,
    NamedSchedule,
    ScheduleName,
    batch_for,
    batch_for_steps,
    find_schedule,
)
from slapo_core.cli.vocabulary import print_names

__all__ = [
    "AsJson",
    "ExampleBatch",
    "MeshSizes",
    "ModelName",
    "NamedSchedule",
    "ScheduleName",
    "StepsBatch",
    "batch_for",
    "batch_for_steps",
    "batch_of",
    "batch_option",
    "call_function",
    "find_function",
    "find_schedule",
    "mesh_of",
    "print_json",
    "print_names",
    "print_table",
    "progress",
    "table_lines",
]
