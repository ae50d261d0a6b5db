"""Verify a schedule whose mesh is only declared: start its processes, replay it there, and verify."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from slapo_core.errors import LaunchError, SerializationError, UnknownNameError, VerifyError
from slapo_core.ranks.launcher import preload_modules, run_ranks
from slapo_core.schedule.replaying import replay
from slapo_core.verification.checking import Options, check
from slapo_core.verification.copies import copy_model
from slapo_core.verification.inputs import Inputs
from slapo_core.verification.report import VerifyReport
from slapo_core.verification.subjects import train_as_at_first

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule
    from slapo_core.spec.primitive import Primitive

__all__ = ["check_in_processes"]


def check_in_processes(schedule: Schedule, example_inputs: Any, options: Options, *, timeout: float) -> VerifyReport:
    """Start as many processes as the declared mesh needs, on this machine's CPU, and verify there.

    Args:
        schedule: dry; each process replays its document on a copy of the untouched model.
        example_inputs: as for :func:`slapo_core.verify`.
        options: as for :func:`slapo_core.verify`.
        timeout: seconds for the whole run.

    Raises:
        VerifyError: what the processes found.
        SerializationError: a step cannot be sent to another process.
        LaunchError: the model cannot be sent to another process, or the script not be imported there.
        RankFailedError: a process ended otherwise; RankTimeoutError if it hung.
    """
    assert schedule.mesh is not None
    inputs = Inputs.of(schedule.example_inputs if example_inputs is None else example_inputs).on_cpu()
    launch = f"launch the script on every rank instead: `{schedule.mesh.launch_command()}`"
    why = (
        f"verify has to repeat this schedule in {schedule.mesh.world_size} processes, because its mesh is only declared"
    )
    try:
        document = schedule.document()
    except SerializationError as error:
        raise SerializationError(f"{why}, but {error.message}", hint=launch) from error
    with schedule.untouched() as model:
        untouched = copy_model(model, shares_memory=True)
    train_as_at_first(untouched, schedule)
    untouched._apply(lambda tensor: tensor if tensor.is_meta else tensor.cpu())
    preload_modules(*_installed_modules(untouched))
    primitives = tuple(dict.fromkeys(type(record.primitive) for record in schedule.records))
    functions = tuple(
        value
        for record in schedule.records
        for name, value in record.primitive.arguments().items()
        if name in record.primitive.named_functions and callable(value)
    )
    try:
        outcomes = run_ranks(
            _check_on_rank,
            untouched,
            document,
            primitives,
            functions,
            schedule.mesh.sizes,
            schedule.plugins,
            (inputs.args, dict(inputs.kwargs)),
            options,
            world_size=schedule.mesh.world_size,
            timeout=timeout,
        )
    except LaunchError as error:
        hint = f"{error.hint}; or {launch}" if error.hint else launch
        raise LaunchError(f"{why}, but {error.message}", hint=hint) from error
    outcome = outcomes[0]
    if isinstance(outcome, VerifyError):
        raise outcome
    return outcome


def _installed_modules(model: nn.Module) -> list[str]:
    """The modules of installed packages that define the model, which each process would import by itself.

    Those of the user's own are not among them: they may change while the server of the processes lives.
    """
    installed = tuple({os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("purelib", "platlib")})
    names = dict.fromkeys(type(module).__module__ for module in model.modules())
    files = {name: getattr(sys.modules.get(name), "__file__", None) or "" for name in names}
    return [name for name, file in files.items() if os.path.realpath(file).startswith(installed)]


def _check_on_rank(
    model: nn.Module,
    document: Mapping[str, Any],
    primitives: tuple[type[Primitive], ...],
    functions: tuple[Any, ...],  # received: their modules are imported, and replay finds them
    sizes: Mapping[str, int],
    plugins: tuple[str, ...],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    options: Options,
) -> VerifyReport | VerifyError:
    from slapo_core.plugins import current_registry

    registry = current_registry()
    for cls in primitives:  # those that a script registered, or applied as values, are in no installed distribution
        try:
            registry.load(cls.name, "primitives")
        except UnknownNameError:
            registry.register(cls)
    args, kwargs = inputs
    try:
        schedule = replay(model, document, mesh=sizes, plugins=plugins)
        return check(schedule, kwargs or args, options)
    except VerifyError as error:  # the same on every rank; sent back as a value, so that it arrives as itself
        error.__cause__ = None
        return error
