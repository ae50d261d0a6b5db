"""Why a step could not be played: which module, which line of the model, and what to do."""

from __future__ import annotations

import linecache
import os
import traceback

import torch

import slapo_core
from slapo_core.errors import EstimateError, SlapoError
from slapo_core.estimation.private import UnsupportedOperatorException
from slapo_core.estimation.values import Unknown

__all__ = ["explained"]

_NOT_THE_USERS = tuple(os.path.dirname(os.path.abspath(str(each.__file__))) + os.sep for each in (torch, slapo_core))


def explained(error: Exception, *, doing: str, module: str | None) -> SlapoError:
    """What is told of an exception in the process that plays a rank.

    Args:
        error: of the model, of torch, or of the user's functions.
        doing: what was being done, e.g. ``"the forward pass"``.
        module: path of the module that ran; None outside of the model.
    """
    if isinstance(error, SlapoError):
        return error
    location, line = _where(error)
    where = f" in module '{module}' ({line})" if module else f" ({line})" if line else ""
    if isinstance(error, Unknown):
        return EstimateError(
            f"the model decides{where} by values that only a real run has: {error}",
            path=module,
            hint="give a batch with values (not on the meta device) if it decides by its integers; if it decides by "
            "what it computes (a router of experts), replace that module by one whose shapes do not depend on values: "
            f"sch['{module or 'path'}'].replace(...)",
            location=location,
        )
    if isinstance(error, UnsupportedOperatorException):
        return EstimateError(
            f"operator {error.func}{where} does not say the shape of its result without memory",
            path=module,
            hint="register it: torch.library.register_fake",
            location=location,
        )
    return EstimateError(
        f"{doing} raised {type(error).__name__}{where}: {error}",
        path=module,
        hint="run one step of the scheduled model on a real batch; slapo.verify(sch) tells which step of the schedule "
        "is to blame",
        location=location,
    )


def _where(error: Exception) -> tuple[tuple[str, int] | None, str]:
    """The last line of the traceback that is neither torch's nor slapo's, and its text."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if os.path.isfile(frame.filename) and not os.path.abspath(frame.filename).startswith(_NOT_THE_USERS):
            return (frame.filename, frame.lineno or 0), linecache.getline(frame.filename, frame.lineno or 0).strip()
    return None, ""
