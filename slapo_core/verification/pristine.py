"""Copies of a model and of the steps for it, both as they were before the first step."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from slapo_core.errors import SerializationError
from slapo_core.spec.record import Record

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule

Step: TypeAlias = Record | SerializationError
"""A step of a schedule, or why it cannot be repeated."""

__all__ = ["Step", "copy_model", "copy_with_steps", "untouched_with_steps"]


def copy_model(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy whose parameters keep the attributes that were set on them.

    Args:
        model: the original.
        memo: as for ``copy.deepcopy``: what was copied already, and what is copied from now on.
    """
    copied = copy.deepcopy(model, memo)
    for name, parameter in copied.named_parameters(remove_duplicate=False):
        original = model.get_parameter(name)
        for key, value in original.__dict__.items():
            parameter.__dict__.setdefault(key, value)
    return copied


def copy_with_steps(model: nn.Module, steps: Iterable[Step]) -> tuple[nn.Module, tuple[Step, ...]]:
    """Copies of both; a module that a step holds and the model share what they shared.

    In the place of a step that holds something that cannot be copied stands the error that says so.
    """
    memo: dict[int, Any] = {}
    copied = copy_model(model, memo)
    return copied, tuple(_copied(step, memo) for step in steps)


def untouched_with_steps(schedule: Schedule) -> tuple[nn.Module, tuple[Step, ...]]:
    """Copies of the untouched model and of all steps, with a module that a step holds as it was before it was put in.

    Raises:
        SealedError: the originals were dropped.
    """
    records = schedule.records
    with schedule.untouched() as model:
        return copy_with_steps(model, records)


def _copied(step: Step, memo: dict[int, Any]) -> Step:
    if isinstance(step, SerializationError):
        return step
    try:
        return dataclasses.replace(step, primitive=copy.deepcopy(step.primitive, memo))
    except Exception as error:  # noqa: BLE001 - whatever the class of a user's object raises; told where it is used
        return SerializationError(
            f"{step} cannot be repeated on a copy: {type(error).__name__}: {error}",
            hint="give the step a function at the top level of a module, which makes what it needs",
        )
