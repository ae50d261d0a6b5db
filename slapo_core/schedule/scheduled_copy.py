"""A schedule read on a copy of its model, for the hooks of plugins."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from slapo_core.errors import ApplyError
from slapo_core.schedule.core import ScheduleCore
from slapo_core.schedule.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from slapo_core.primitive import Record


class ScheduledCopy(Schedule):
    """A read-only schedule of a deep copy of a schedule's model: the same steps, at the modules of the copy.

    Args:
        schedule: with the steps; neither it nor its model is changed.
        model: a deep copy of the schedule's model as it is now; later steps are not followed.
    """

    def __init__(self, schedule: Schedule, model: nn.Module) -> None:
        self.model, self.mesh, self.example_inputs = model, schedule.mesh, schedule.example_inputs
        self._core = _ReadOnlyCore(self, schedule._core)


class _ReadOnlyCore(ScheduleCore):
    """The history, registry and hooks of ``original``, with a tree of its own."""

    def __init__(self, schedule: ScheduledCopy, original: ScheduleCore) -> None:
        self.schedule, self._original = schedule, original
        self.plugins, self.history, self.sealed_by = original.plugins, original.history, original.sealed_by
        self._registry, self._hooks = original.registry, original.hooks
        self.tree = original.tree.of_copy(schedule.model, self)

    @contextlib.contextmanager
    def rewound(self, to: Record | int) -> Iterator[nn.Module]:
        with self._original.rewound(to) as model:
            yield model

    def check_open(self, what: str) -> None:
        raise ApplyError(f"cannot {what}: this is a read-only copy of the scheduled model")
