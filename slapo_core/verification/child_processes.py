"""Verify schedules of an abstract mesh: start its processes, repeat the steps there, and compare."""

from __future__ import annotations

import inspect
import os
import pickle
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from slapo_core.errors import (
    ArgumentError,
    LaunchError,
    RankFailedError,
    ReplayError,
    SerializationError,
    SlapoError,
    UnknownNameError,
    VerifyError,
)
from slapo_core.private import apply_to_tensors
from slapo_core.ranks.launcher import preload_modules, run_ranks
from slapo_core.ranks.trial_mesh import SECONDS
from slapo_core.schedule.creation import create_schedule
from slapo_core.verification.copies import reference_with_steps, train_as_at_first
from slapo_core.verification.inputs import Inputs
from slapo_core.verification.report import Outcome
from slapo_core.verification.session import check_each
from slapo_core.verification.trials import Options

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule
    from slapo_core.spec.primitive import Primitive, Record


@dataclass(frozen=True)
class Sent:
    """A schedule to be sent: the reference model and the steps as values; one pickle keeps shared objects."""

    model: nn.Module
    steps: tuple[Record, ...]
    plugins: tuple[str, ...]
    example_inputs: Any = None

    def schedule(self, mesh: Mapping[str, int] | None, example_inputs: Any) -> Schedule:
        """Make the schedule for this process's rank."""
        return _repeated(self, mesh)


def check_in_processes(
    schedules: Sequence[Schedule], inputs: Inputs, options: Options, *, timeout: float
) -> list[Outcome]:
    """Start as many processes as the declared mesh needs, on this machine's CPU, and verify there.

    Args:
        schedules: of one abstract mesh; each process repeats their steps on copies of the reference models.
        inputs: one batch, on the CPU.
        options: as for :func:`slapo_core.verify`.
        timeout: seconds for the whole run.

    Returns:
        for each schedule its report or its error.

    Raises:
        SerializationError: a step cannot be sent to another process.
        LaunchError: the model cannot be sent to another process, or the script not be imported there.
        ArgumentError: the model does not run on the batch.
        RankFailedError: a process ended otherwise, or hung.
    """
    mesh = schedules[0].mesh
    assert mesh is not None
    launch = f"launch the script on every rank instead: `{mesh.launch_command()}`"
    why = f"verify has to repeat this schedule in {mesh.world_size} processes, because its mesh is only declared"
    try:
        all_sent = [sent(schedule) for schedule in schedules]
    except SerializationError as error:
        hint = f"{error.hint}; or {launch}" if error.hint else launch
        raise SerializationError(f"{why}, but {error.message}", hint=hint) from error
    for one in all_sent:
        preload_modules(*installed_modules(one.model))
    try:
        ranks = run_ranks(
            _check_on_rank,
            all_sent,
            mesh.sizes,
            (inputs.args, dict(inputs.kwargs)),
            options,
            world_size=mesh.world_size,
            timeout=timeout + (options.blame_seconds or 0.0) + 2 * SECONDS,
        )
    except LaunchError as error:
        hint = f"{error.hint}; or {launch}" if error.hint else launch
        raise LaunchError(f"{why}, but {error.message}", hint=hint) from error
    except RankFailedError as error:
        if isinstance(error.__cause__, ArgumentError):  # a batch that the model does not take: no rank's fault
            raise error.__cause__ from None
        raise
    return ranks[0]


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
    whole = []
    for step in steps:
        if isinstance(step, SerializationError):
            raise step
        whole.append(step)
    values = [value for step in whole for value in step.primitive.arguments().values()]
    strip([model, *(value for value in values if isinstance(value, nn.Module))])
    for step in whole:
        for name, value in step.primitive.arguments().items():
            _require_sendable(step, name, value)
    return Sent(model, tuple(whole), schedule.plugins, schedule.example_inputs)


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

    Those of the user's own are not among them: they may change while the server of the processes lives.
    """
    installed = tuple({os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("purelib", "platlib")})
    names = dict.fromkeys(type(module).__module__ for module in model.modules())
    files = {name: getattr(sys.modules.get(name), "__file__", None) or "" for name in names}
    return [name for name, file in files.items() if os.path.realpath(file).startswith(installed)]


def _check_on_rank(
    sent: Sequence[Sent],
    sizes: Mapping[str, int],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    options: Options,
) -> list[Outcome]:
    args, kwargs = inputs
    try:
        outcomes = check_each([_repeated(one, sizes) for one in sent], kwargs or args, options)
    except VerifyError as error:  # of the only one
        outcomes = [error]
    for outcome in outcomes:
        if isinstance(outcome, VerifyError):
            outcome.__cause__ = None  # sent back as a value, so that it arrives as itself; not so its cause
    return outcomes


def _repeated(sent: Sent, sizes: Mapping[str, int] | None) -> Schedule:
    _register({type(step.primitive): None for step in sent.steps})
    schedule = create_schedule(sent.model, mesh=sizes, plugins=sent.plugins, example_inputs=sent.example_inputs)
    for step in sent.steps:
        try:
            schedule.apply_at(schedule.tree.node(step.path), step.primitive, location=step.location or None)
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
