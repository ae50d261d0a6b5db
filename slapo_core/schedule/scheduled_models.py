"""Which models carry the steps of a schedule: a second schedule on top of them would take pieces for whole tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from slapo_core.errors import ArgumentError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["note_steps", "refuse_if_scheduled"]

# About models and not about plugins or settings: an entry goes with its model, so nothing leaks from test to test.
_STEPS: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def note_steps(model: nn.Module, count: int) -> None:
    """Remember that ``model`` carries ``count`` steps now."""
    if count:
        _STEPS[model] = count
    else:
        _STEPS.pop(model, None)


def refuse_if_scheduled(model: nn.Module) -> None:
    """Raise if ``model`` carries the steps of a schedule.

    Raises:
        ArgumentError: it does; the message says how many.
    """
    count = _STEPS.get(model, 0)
    if count:
        steps = "1 step" if count == 1 else f"{count} steps"
        raise ArgumentError(
            f"this {type(model).__name__} carries {steps} of another schedule, which would be taken for the untouched "
            "model",
            hint="go on with that schedule, take it back first with sch.undo(to=0), or make a fresh model",
        )
