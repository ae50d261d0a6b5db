"""Copies of a scheduled model: to be read, to repeat the steps on, and to send to other processes."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
import pickle
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from slapo_core import Schedule, create_schedule
from slapo_core.errors import ReplayError, SerializationError, SlapoError, UnknownNameError
from slapo_core.internals import Internals, copies
from slapo_core.primitive import Record
from slapo_runtime.private import apply_to_tensors, register_outputs, without_output_hooks

if TYPE_CHECKING:
    from slapo_core.layout import Mesh
    from slapo_core.primitive import Primitive


def copy_model(
    model: nn.Module,
    memo: dict[int, Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
    shares_memory: bool = False,
) -> nn.Module:
    """Copy a model deeply; parameters keep the attributes that were set on them.

    Args:
        model: only read.
        memo: as for ``copy.deepcopy``: the copies made so far; extended.
        dtype: that :func:`convert` will be asked for: as far as possible, the copy has it already.
        shares_memory: whether parameters and buffers are other objects over the same memory: for a copy that is to be
            looked at, or copied again, but not run. Not together with ``dtype``.
    """
    memo = {} if memo is None else memo
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) in memo:
            continue
        made = _made(tensor, dtype, shares_memory=shares_memory)
        if made is not None:
            memo[id(tensor)] = made
    copied = copies.deep_copy(model, memo)
    for name, parameter in copied.named_parameters(remove_duplicate=False):
        original = model.get_parameter(name)
        for key, value in original.__dict__.items():
            parameter.__dict__.setdefault(key, value)
    return copied


def _made(tensor: torch.Tensor, dtype: torch.dtype | None, *, shares_memory: bool) -> torch.Tensor | None:
    """Return the copy of a tensor; None to leave it to ``deepcopy``."""
    is_plain = type(tensor) in (nn.Parameter, torch.Tensor) and tensor.layout is torch.strided and tensor.is_leaf
    if not is_plain or tensor.is_meta:
        return None
    if shares_memory:
        data = tensor.detach()
    elif dtype is not None and tensor.is_floating_point() and tensor.dtype is not dtype:
        data = tensor.detach().to(dtype)  # at once: a copy of the same type first would be memory for nothing
    else:
        return None
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(data, requires_grad=tensor.requires_grad)
    data.__dict__.update(tensor.__dict__)
    return data.requires_grad_(tensor.requires_grad)


Step: TypeAlias = Record | SerializationError
"""A step of a schedule, or why it cannot be repeated."""


def copy_with_steps(
    model: nn.Module, steps: Iterable[Step], *, shares_memory: bool = False
) -> tuple[nn.Module, tuple[Step, ...]]:
    """Copy model and steps; a module that a step holds shares with the model what it shared before.

    A step with a value that cannot be copied is replaced by its error.

    Args:
        model: only read.
        steps: to be repeated on the copy.
        shares_memory: see :func:`copy_model`; for the model.
    """
    memo: dict[int, Any] = {}
    copied = copy_model(model, memo, shares_memory=shares_memory)
    return copied, tuple(_copied(step, memo) for step in steps)


def reference_with_steps(schedule: Schedule, *, shares_memory: bool = False) -> tuple[nn.Module, tuple[Step, ...]]:
    """Copy the reference model and all steps, with modules that steps hold as they were before.

    Raises:
        SealedError: the originals were dropped.
    """
    records = schedule.records
    with schedule.reference() as model:
        return copy_with_steps(model, records, shares_memory=shares_memory)


def repeated(schedule: Schedule, mesh: Mesh | None) -> Schedule:
    """Repeat all steps on a copy of the reference model and another mesh.

    Args:
        schedule: only read.
        mesh: of the same sizes.

    Raises:
        SerializationError: a step cannot be repeated on a copy.
        SlapoError: a step is refused.
    """
    model, steps = reference_with_steps(schedule)
    frozen = {name for name, is_trained in Internals(schedule).tree.tensors.trained_at_first.items() if not is_trained}
    for name, parameter in model.named_parameters():
        if name in frozen:  # a step that trains it, and does not say so, changes the reference model's own too
            parameter.requires_grad_(False)
    copied = Schedule(
        model,
        mesh=mesh,
        plugins=Internals(schedule).plugins,
        registry=Internals(schedule).registry,
        example_inputs=schedule.example_inputs,
    )
    for step in steps:
        if isinstance(step, SerializationError):
            raise step
        Internals(copied).repeat(step)
    return copied


def _copied(step: Step, memo: dict[int, Any]) -> Step:
    if isinstance(step, SerializationError):
        return step
    try:
        return dataclasses.replace(step, primitive=copy.deepcopy(step.primitive, memo))
    except Exception as error:  # noqa: BLE001 - whatever the class of a user's object raises; told where it is used
        return SerializationError(
            f"{step} cannot be repeated on a copy: {type(error).__name__}: {error}",
            hint="give the step a function at the top level of a module that makes the value",
        )


def train_as_at_first(model: nn.Module, schedule: Schedule) -> None:
    """Restore ``requires_grad`` of a copy of the reference model as before the first step.

    A step that changes whether a parameter is trained, and does not say so, changes the reference model's own too.
    """
    flags = Internals(schedule).tree.tensors.trained_at_first
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(flags.get(name, parameter.requires_grad))


@dataclass(frozen=True)
class Sent:
    """A schedule to be sent: the reference model and the steps as values; one pickle keeps shared objects."""

    model: nn.Module
    steps: tuple[Record, ...]
    plugins: tuple[str, ...]
    example_inputs: Any = None

    def schedule(self, mesh: Mapping[str, int] | None, example_inputs: Any = None) -> Schedule:
        """Make the schedule for this process's rank."""
        return _repeated(self, mesh)


def _on_cpu(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        apply_to_tensors(module, lambda tensor: tensor if tensor.is_meta else tensor.cpu())


def sent(schedule: Schedule, *, strip: Callable[[Iterable[nn.Module]], None] = _on_cpu) -> Sent:
    """Prepare a schedule to be sent to another process.

    Args:
        schedule: not sealed; it is only read.
        strip: is given the copies of the model and of the modules that steps hold, before anything is sent.

    Raises:
        SealedError: the originals were dropped.
        SerializationError: a step cannot be sent to another process.
    """
    model, steps = reference_with_steps(schedule, shares_memory=True)
    train_as_at_first(model, schedule)
    without_output_hooks(model)
    for module in model.modules():
        module.__dict__.pop("extra_repr", None)  # of torchao: pickle refuses the function, which is for people only
    sendable = []
    for step in steps:
        if isinstance(step, SerializationError):
            raise step
        sendable.append(step)
    values = [value for step in sendable for value in step.primitive.arguments().values()]
    strip([model, *(value for value in values if isinstance(value, nn.Module))])
    for step in sendable:
        for name, value in step.primitive.arguments().items():
            _require_sendable(step, name, value)
    return Sent(model, tuple(sendable), Internals(schedule).plugins, schedule.example_inputs)


def _require_sendable(step: Record, name: str, value: Any) -> None:
    """
    Raises:
        SerializationError: pickle refuses the value, or its class; it names the argument and the step.
    """
    try:
        pickle.dumps(value)
    except Exception as error:  # pickle raises several kinds, and whatever __reduce__ raises
        what = value if inspect.isroutine(value) or inspect.isclass(value) else type(value)
        called = getattr(what, "__qualname__", type(what).__name__)
        raise SerializationError(
            f"argument '{name}' of {step} cannot be sent to another process: {error}",
            hint=f"define {called} at the top level of a module, by its own name (no lambda, nothing inside of a "
            "function), and pass its values as arguments (functools.partial)",
        ) from error


def installed_modules(model: nn.Module) -> list[str]:
    """List the modules of installed packages that define the model, to preload them for all processes.

    The user's own modules are left out: they may change while the server of the processes lives.
    """
    installed = tuple({os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("purelib", "platlib")})
    names = dict.fromkeys(type(module).__module__ for module in model.modules())
    files = {name: getattr(sys.modules.get(name), "__file__", None) or "" for name in names}
    return [name for name, file in files.items() if os.path.realpath(file).startswith(installed)]


def _repeated(sent: Sent, sizes: Mapping[str, int] | None) -> Schedule:
    _register({type(step.primitive): None for step in sent.steps})
    register_outputs(sent.model)
    schedule = create_schedule(sent.model, mesh=sizes, plugins=sent.plugins, example_inputs=sent.example_inputs)
    for step in sent.steps:
        try:
            Internals(schedule).repeat(step)
        except SlapoError as error:
            raise ReplayError(
                f"{step} was refused on rank {schedule.mesh.global_rank if schedule.mesh else 0}: {error.message}",
                path=step.path,
                hint=error.hint,
            ) from error
    return schedule


def _register(primitives: Mapping[type[Primitive], None]) -> None:
    """Register primitives that a script registered or applied as values."""
    from slapo_core.plugins import current_registry

    registry = current_registry()
    for cls in primitives:
        try:
            registry.load(cls.name, "primitives")
        except UnknownNameError:
            registry.register(cls)
