"""A schedule as it was before a build that must fail: nothing may be left behind, and it can be used on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slapo_core.building.phases import build
from slapo_core.primitives.annotate import Annotate
from slapo_core.testing.check import CheckError
from slapo_core.testing.snapshot import ModelSnapshot, listed

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule

__all__ = ["Before"]


class Before:
    """Everything observable about a schedule and its model; the schedule is only read."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._model = ModelSnapshot(schedule.model)
        self._records, self._layouts = schedule.records, dict(schedule.tree.layouts)

    def differences(self) -> list[str]:
        """What is not as it was, one line each."""
        schedule = self._schedule
        lines = self._model.differences(schedule.model)
        if schedule.records != self._records:
            lines.append("the records of the schedule: not those of before")
        if schedule.tree.layouts != self._layouts:
            lines.append("the layouts of the schedule: not those of before")
        if schedule.is_sealed:
            lines.append("the schedule: sealed")
        return lines

    def require(self, what: str) -> None:
        """Hold the schedule against itself, then use it on: another step, undo, and a build for another target.

        Args:
            what: what has just failed, for the message, e.g. ``"refusing micro_batches=0"``.

        Raises:
            CheckError: something was left behind, or the schedule cannot be used.
        """
        lines = self.differences()
        if lines:
            raise CheckError(
                f"{what} leaves traces",
                required="the model is bit-identical to before, and the schedule has the same steps",
                got=listed(lines),
                hint="refuse in check() or plan(); in build(), change the model only after everything that can fail",
            )
        schedule = self._schedule
        name = next(name for name, _ in schedule.model.named_parameters())
        path, _, own_name = name.rpartition(".")
        try:
            schedule.apply_at(schedule.tree.node(path), Annotate(own_name, "tried", True))
            schedule.undo()
            lines = self.differences()
            build(schedule, "torch")
        except Exception as error:
            raise CheckError(
                f"the schedule cannot be used after {what}",
                required="another step, undo(), and a build for target 'torch' work",
                got=f"{type(error).__name__}: {error}",
                hint="keep no state outside of the engine, such as an attribute of the model",
            ) from error
        if lines:
            raise CheckError(
                f"undo() after {what} does not give back the model",
                required="bit-identical to before",
                got=listed(lines),
                hint="keep no state outside of the engine, such as an attribute of the model",
            )
