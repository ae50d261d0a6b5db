"""Run a function on the ranks of a declared mesh, in processes on this machine's CPU that repeat the schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from slapo_core.errors import ArgumentError, LaunchError, RankFailedError, SerializationError
from slapo_runtime.launcher import preload_modules, run_ranks
from slapo_runtime.schedule_copies import installed_modules, sent

if TYPE_CHECKING:
    from slapo_core import Schedule

T = TypeVar("T")


def on_declared_ranks(
    function: Callable[..., T], schedules: Sequence[Schedule], *arguments: Any, what: str, timeout: float
) -> list[T]:
    """Call ``function(sent, sizes, *arguments)`` on each rank of an abstract mesh.

    Args:
        function: at the top level of a module; ``sent`` is a list of :class:`slapo_runtime.schedule_copies.Sent`.
        schedules: of one abstract mesh; they are only read.
        arguments: further ones, anything that pickle can send.
        what: the caller's name, for messages.
        timeout: seconds for all.

    Returns:
        the results in the order of the ranks.

    Raises:
        SerializationError: a step cannot be sent to another process.
        LaunchError: the model or an argument cannot be sent to another process, or the script not be imported there.
        ArgumentError: a rank raised it.
        RankFailedError: a process raised something else, ended, or hung.
    """
    mesh = schedules[0].mesh
    assert mesh is not None
    launch = mesh.launch_hint()
    if launch == mesh.launch_command():
        launch = f"launch the script on every rank instead: `{launch}`"
    why = f"{what} has to repeat this schedule in {mesh.world_size} processes, because its mesh is only declared"
    try:
        all_sent = [sent(schedule) for schedule in schedules]
    except SerializationError as error:
        hint = f"{error.hint}; or {launch}" if error.hint else launch
        raise SerializationError(f"{why}, but {error.message}", hint=hint) from error
    preload_modules(function.__module__)
    for one in all_sent:
        preload_modules(*installed_modules(one.model))
    try:
        return run_ranks(function, all_sent, mesh.sizes, *arguments, world_size=mesh.world_size, timeout=timeout)
    except LaunchError as error:
        hint = f"{error.hint}; or {launch}" if error.hint else launch
        raise LaunchError(f"{why}, but {error.message}", hint=hint) from error
    except RankFailedError as error:
        if isinstance(error.__cause__, ArgumentError):  # a batch that the model does not take: no rank's fault
            raise error.__cause__ from None
        raise
