"""Copies of a model and of the steps for it, both as they were before the first step."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from slapo_core.errors import SerializationError
from slapo_core.spec.record import Record
from slapo_core.verification.copies import copy_model
from slapo_core.verification.counterparts import named_tensors

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule
    from slapo_core.spec.mesh import Mesh

Step: TypeAlias = Record | SerializationError
"""A step of a schedule, or why it cannot be repeated."""

__all__ = ["Step", "changed_outside", "copy_with_steps", "repeated", "train_as_at_first", "untouched_with_steps"]


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


def repeated(schedule: Schedule, mesh: Mesh | None) -> Schedule:
    """The schedule with all of its steps once more, on a copy of the untouched model and another mesh.

    Args:
        schedule: only read.
        mesh: of the same sizes.

    Raises:
        SerializationError: a step cannot be repeated on a copy.
        SlapoError: a step is refused.
    """
    from slapo_core.schedule.schedule import Schedule

    model, steps = untouched_with_steps(schedule)
    frozen = {name for name, is_trained in schedule.tree.tensors.trained_at_first.items() if not is_trained}
    for name, parameter in model.named_parameters():
        if name in frozen:  # a step that trains it, and does not say so, changes the untouched model's own too
            parameter.requires_grad_(False)
    copied = Schedule(
        model,
        mesh=mesh,
        plugins=schedule.plugins,
        registry=schedule.registry,
        example_inputs=schedule.example_inputs,
    )
    for step in steps:
        if isinstance(step, SerializationError):
            raise step
        copied.apply_at(copied.tree.node(step.path), step.primitive, location=step.location or None)
    return copied


def changed_outside(schedule: Schedule, copied: Schedule) -> str | None:
    """The first module or tensor that is not what the steps make: of another type or value, or with other hooks.

    Args:
        schedule: only read.
        copied: what :func:`repeated` gave for it.
    """
    live, made = ({name: (what, values) for name, what, values in _parts(one)} for one in (schedule, copied))
    for name in dict.fromkeys((*live, *made)):
        if name not in live or name not in made or live[name][0] != made[name][0]:
            return name
        one, other = live[name][1], made[name][1]
        if one is not None and other is not None and not torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True):
            return name
    return None


def _parts(schedule: Schedule) -> Iterator[tuple[str, Any, torch.Tensor | None]]:
    """Every module and tensor: what it is, and the values that do not depend on random numbers of a step."""
    for path, module in schedule.model.named_modules():
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        own = [hook for hook in hooks if not type(hook).__module__.startswith("slapo_core.schedule.")]  # not of a guard
        yield path, (type(module).__qualname__, len(own)), None
    for name, tensor in named_tensors(schedule.model):
        origin = schedule.tree.tensors.layout(tensor, name).origin
        is_drawn = tensor.is_meta or (isinstance(tensor, nn.Parameter) and not origin)
        yield name, (tensor.shape, tensor.requires_grad, origin), None if is_drawn else tensor.detach()


def train_as_at_first(model: nn.Module, schedule: Schedule) -> None:
    """Let a copy of the untouched model train what it trained before the first step.

    A step that changes whether a parameter is trained, and does not say so, changes the untouched model's own too.
    """
    flags = schedule.tree.tensors.trained_at_first
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(flags.get(name, parameter.requires_grad))


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
