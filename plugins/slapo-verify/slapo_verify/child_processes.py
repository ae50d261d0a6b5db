"""Verify schedules of an abstract mesh in child processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.errors import VerifyError
from slapo_runtime.declared_ranks import on_declared_ranks
from slapo_runtime.ranks.trial_groups import SECONDS
from slapo_verify.inputs import Inputs
from slapo_verify.report import VerifyOutcome
from slapo_verify.session import check_each
from slapo_verify.trials import VerifyOptions

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_runtime.schedule_copies import Sent

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
    batch = (inputs.args, dict(inputs.kwargs))
    seconds = timeout + 2 * SECONDS + (_NO_LIMIT if options.blame_seconds is None else options.blame_seconds)
    return on_declared_ranks(_check_on_rank, schedules, batch, options, what="verify", timeout=seconds)[0]


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
