"""The steps of a schedule in order: which are in force, and undo."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from slapo_core.errors import SealedError, UndoError, warn_user
from slapo_core.primitive import Record
from slapo_core.schedule.scheduled_models import Claim, refuse_if_scheduled
from slapo_core.schedule.transaction import Step
from slapo_core.tree.journal import JournalEntry, ReplaceModule


class History:
    """The applied steps, oldest first.

    Args:
        model: to which it was applied.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._claim = model, Claim()
        self._steps: list[Step] = []
        self.records: tuple[Record, ...] = ()
        self.in_force: int | None = None
        """While rewound: the number of steps in force."""
        self.guards: tuple[Any, ...] = ()
        """Objects of kind ``guards``, of a live model: they follow each step applied, undone or redone."""
        self.cache: dict[str, Any] = {}
        """Results of other layers about the model, valid until a step comes or goes."""

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def distributions(self) -> frozenset[str]:
        """Distributions whose primitives were applied."""
        return frozenset(name for step in self._steps for name in step.distributions)

    def entries(self) -> Iterator[tuple[Record, JournalEntry]]:
        """Yield each step's journal entries, in order."""
        return ((step.record, entry) for step in self._steps for entry in step.entries)

    def check_start(self) -> None:
        """Check that a model without steps can be the reference model.

        Raises:
            ArgumentError: it carries the steps of another schedule.
        """
        if not self._steps:
            refuse_if_scheduled(self._model)

    def append(self, step: Step) -> None:
        self._steps.append(step)
        self.records = (*self.records, step.record)
        self.cache.clear()
        self._tell(step, is_new=True)
        self._claim.note(self._model, len(self._steps))

    def position(self, to: Record | int | None) -> int:
        """Return how many steps remain when everything after ``to`` is undone; None: all but the last.

        Raises:
            UndoError: the schedule has no such step.
        """
        count = len(self._steps)
        if to is None:
            if not count:
                raise UndoError("nothing to undo: the schedule has no steps", hint="sch.records lists the steps")
            return count - 1
        if not isinstance(to, (Record, int)) or isinstance(to, bool):
            raise UndoError(f"to must be a record or the index of one (got {to!r})", hint="see sch.records")
        index = to.index if isinstance(to, Record) else to
        known = 0 <= index <= count and (not isinstance(to, Record) or (index > 0 and self.records[index - 1] == to))
        if not known:
            raise UndoError(f"step {to} is not in this schedule, which has {count} steps", hint="see sch.records")
        return index

    def undo(self, keep: int) -> tuple[Record, ...]:
        """Undo all but the first ``keep`` steps; return their records, latest first."""
        undone = []
        try:
            while len(self._steps) > keep:
                self._undo(self._steps[-1])
                undone.append(self._steps.pop().record)
                self.records = self.records[: len(self._steps)]
                self.cache.clear()
        finally:  # also where a step cannot be taken back, after others that were
            self._claim.note(self._model, len(self._steps))
        return tuple(undone)

    @contextlib.contextmanager
    def rewound(self, to: int) -> Iterator[None]:
        """Keep only the first ``to`` steps in force during a ``with`` block."""
        before = self.in_force
        try:
            self._move(to)
            yield
        finally:
            try:
                self._move(before if before is not None else len(self._steps))
            finally:
                self.in_force = None if before is None else min(before, len(self._steps))

    def removal_of(self, path: str) -> Record | None:
        """Return the step that removed the module at ``path``; None if none did."""
        for step in reversed(self._steps):
            for entry in step.entries:
                if isinstance(entry, ReplaceModule) and entry.took_out(path):
                    return step.record
        return None

    def drop_originals(self) -> None:
        """Drop the originals that undo needs."""
        self._steps = [Step(step.record, (), step.distributions) for step in self._steps]

    def check_in_force(self, what: str) -> None:
        """Refuse a call while the model is rewound.

        Raises:
            SealedError: it is.
        """
        if self.in_force is not None:
            raise SealedError(
                f"cannot {what}: the schedule is rewound to step {self.in_force} in a `with` block",
                hint="leave the block of sch.reference() or sch.rewound() first, or create a new schedule",
            )

    def _move(self, to: int) -> None:
        if self.in_force is None:
            self.in_force = len(self._steps)
        while self.in_force > to:
            self._undo(self._steps[self.in_force - 1])
            self.in_force -= 1
        while self.in_force < to:
            step = self._steps[self.in_force]
            try:
                step.redo()
            except Exception as error:
                self._forget_after(self.in_force)
                is_half = isinstance(error, UndoError)
                raise UndoError(
                    f"{error.message if is_half else _refused(step, 'be redone', error)}; the schedule ends "  # type: ignore[attr-defined]
                    f"before it now, with {self.in_force} of {to} steps in force",
                    path=step.record.path,
                    hint="make a fresh model, and replay the schedule"
                    if is_half
                    else "make changes of the model before create_schedule(), and apply the steps again",
                ) from error
            self._tell(step)
            self.in_force += 1

    def _forget_after(self, count: int) -> None:
        """Drop the records of steps that are not in force."""
        self._steps, self.records = self._steps[:count], self.records[:count]
        self.cache.clear()
        self._claim.note(self._model, count)

    def _undo(self, step: Step) -> None:
        try:
            step.undo()
        except UndoError:
            raise
        except Exception as error:
            raise UndoError(
                f"{_refused(step, 'be undone', error)}, and it stays in force with those before it",
                path=step.record.path,
                hint="undo changes made outside of the schedule after the step (e.g. a parametrization); or make them "
                "before create_schedule()",
            ) from error
        self._tell(step, undone=True)

    def _tell(self, step: Step, **how: bool) -> None:
        """Let the guards follow a step; remove those that raise."""
        for guards in self.guards:
            try:
                guards.follow(step, **how)
            except Exception as error:  # noqa: BLE001 - a broken plugin breaks nothing but itself
                self.guards = tuple(each for each in self.guards if each is not guards)
                name = f"{type(guards).__module__}.{type(guards).__qualname__}"
                warn_user(f"the guards {name} raised {type(error).__name__}: {error}; they are left out from now on")


def _refused(step: Step, what: str, error: Exception) -> str:
    return (
        f"step {step.record}, at {step.record.location}, cannot {what}: something else replaced what it changed "
        f"({type(error).__name__}: {error})"
    )
