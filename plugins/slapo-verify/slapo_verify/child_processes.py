"""Verify schedules of an abstract mesh in child processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.errors import (
    ArgumentError,
    LaunchError,
    RankFailedError,
    SerializationError,
    VerifyError,
)
from slapo_runtime.launcher import preload_modules, run_ranks
from slapo_runtime.ranks.trial_groups import SECONDS
from slapo_runtime.schedule_copies import Sent, installed_modules, sent
from slapo_verify.inputs import Inputs
from slapo_verify.report import VerifyOutcome
from slapo_verify.session import check_each
from slapo_verify.trials import VerifyOptions

if TYPE_CHECKING:
    from slapo_core import Schedule

_NO_LIMIT = 7 * 86400.0  # seconds: of a search that the user ends


def check_in_processes(
    schedules: Sequence[Schedule], inputs: Inputs, options: VerifyOptions, *, timeout: float
) -> list[VerifyOutcome]:
    """Start the processes of the declared mesh on this machine's CPU, and verify there.

    Args:
        schedules: of one abstract mesh; each process repeats their steps on copies of the reference models.
        inputs: one batch, on the CPU.
        options: as for :func:`slapo_core.verify`.
        timeout: seconds for the run, without the search for the steps to blame.

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
    launch = mesh.launch_hint()
    if launch == mesh.launch_command():
        launch = f"launch the script on every rank instead: `{launch}`"
    why = f"verify has to repeat this schedule in {mesh.world_size} processes, because its mesh is only declared"
    try:
        all_sent = [sent(schedule) for schedule in schedules]
    except SerializationError as error:
        hint = f"{error.hint}; or {launch}" if error.hint else launch
        raise SerializationError(f"{why}, but {error.message}", hint=hint) from error
    preload_modules(check_each.__module__)
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
            timeout=timeout + 2 * SECONDS + (_NO_LIMIT if options.blame_seconds is None else options.blame_seconds),
        )
    except LaunchError as error:
        hint = f"{error.hint}; or {launch}" if error.hint else launch
        raise LaunchError(f"{why}, but {error.message}", hint=hint) from error
    except RankFailedError as error:
        if isinstance(error.__cause__, ArgumentError):  # a batch that the model does not take: no rank's fault
            raise error.__cause__ from None
        raise
    return ranks[0]


def _check_on_rank(
    sent: Sequence[Sent],
    sizes: Mapping[str, int],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    options: VerifyOptions,
) -> list[VerifyOutcome]:
    args, kwargs = inputs
    try:
        with torch.autocast("cpu", options.autocast, enabled=options.autocast is not None):
            outcomes = check_each([one.schedule(sizes) for one in sent], kwargs or args, options)
    except VerifyError as error:  # of the only one
        outcomes = [error]
    for outcome in outcomes:
        if isinstance(outcome, VerifyError):
            outcome.__cause__ = None  # sent back as a value, so that it arrives as itself; not so its cause
    return outcomes
