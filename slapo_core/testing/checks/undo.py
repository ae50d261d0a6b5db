"""Undo takes back everything, redo brings back the same."""

from __future__ import annotations

from collections.abc import Mapping

from slapo_core.testing.bench import Bench, prepare
from slapo_core.testing.case import Case
from slapo_core.testing.check import CheckError
from slapo_core.testing.snapshot import ModelSnapshot, listed

__all__ = ["undo_is_exact"]


def undo_is_exact(case: Case) -> None:
    """Undo gives back the reference model bit by bit, and redo the very same scheduled model."""
    bench = prepare(case, mesh_size=2)
    before, layouts = ModelSnapshot(bench.model), dict(bench.schedule.tree.layouts)
    steps = len(bench.schedule.records)
    bench.apply()
    bench.schedule.undo()
    _compare(before, layouts, bench, "undo() does not give back the model of before")
    bench.apply()
    scheduled, new_layouts = ModelSnapshot(bench.model), dict(bench.schedule.tree.layouts)
    with bench.schedule.rewound(steps):
        _compare(before, layouts, bench, "rewound() does not give back the model of before")
    _compare(scheduled, new_layouts, bench, "redoing the step does not give back the scheduled model")
    bench.schedule.undo()
    _compare(before, layouts, bench, "undo() after a redo does not give back the model of before")


def _compare(expected: ModelSnapshot, layouts: Mapping[str, object], bench: Bench, violation: str) -> None:
    lines = expected.differences(bench.model)
    if bench.schedule.tree.layouts != layouts:
        lines.append("the layouts of the schedule: not those of before")
    if lines:
        raise CheckError(
            violation,
            required="the same objects with the same bits",
            got=listed(lines),
            hint="make every change through `edit`, which knows how to take it back",
        )
