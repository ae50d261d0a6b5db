"""Copies of a model and of the steps for it, both as they were before the first step."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from slapo_core.errors import SerializationError
from slapo_core.spec.record import Record
from slapo_core.verification.copies import copy_model

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule

Step: TypeAlias = Record | SerializationError
"""A step of a schedule, or why it cannot be repeated."""

__all__ = ["Step", "copy_with_steps", "untouched_with_steps"]


def copy_with_steps(
    model: nn.Module, steps: Iterable[Step], *, shares_memory: bool = False
) -> tuple[nn.Module, tuple[Step, ...]]:
    """Copies of both; a module that a step holds and the model share what they shared.

    In the place of a step that holds something that cannot be copied stands the error that says so.

    Args:
        model: only read.
        steps: to be repeated on the copy.
        shares_memory: see :func:`~slapo_core.verification.copies.copy_model`; for the model.
    """
    memo: dict[int, Any] = {}
    copied = copy_model(model, memo, shares_memory=shares_memory)
    return copied, tuple(_copied(step, memo) for step in steps)


def untouched_with_steps(schedule: Schedule, *, shares_memory: bool = False) -> tuple[nn.Module, tuple[Step, ...]]:
    """Copies of the untouched model and of all steps, with a module that a step holds as it was before it was put in.

    Raises:
        SealedError: the originals were dropped.
    """
    records = schedule.records
    with schedule.untouched() as model:
        return copy_with_steps(model, records, shares_memory=shares_memory)


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
