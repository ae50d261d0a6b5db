"""Why a step could not be played: which module, which line of the model, and what to do."""

from __future__ import annotations

import linecache
import os
import traceback

import torch
from torch import nn

import slapo_core
from slapo_core.errors import EstimateError, SlapoError
from slapo_core.estimation.values import Unknown
from slapo_core.private import UnsupportedOperatorException

__all__ = ["explained"]

_NOT_THE_USERS = tuple(os.path.dirname(os.path.abspath(str(each.__file__))) + os.sep for each in (torch, slapo_core))


def explained(error: Exception, *, doing: str, model: nn.Module | None) -> SlapoError:
    """What is told of an exception in the process that plays a rank.

    Args:
        error: of the model, of torch, or of the user's functions.
        doing: what was being done, e.g. ``"a training step"``.
        model: that is being trained; None before.
    """
    if isinstance(error, SlapoError):
        return error
    location, line = _where(error)
    module = _module(error, model) if model is not None else None
    where = f" in module '{module}'" if module else ""
    where += f" (`{line}`)" if line else ""
    if isinstance(error, Unknown):
        return EstimateError(
            f"the model asks{where} for values that only a real run has: {error}",
            path=module,
            hint="integers are known where they follow from a batch with values, or from a buffer of a model with "
            "values: give those, not on the meta device; what it computes is not known: leave out what only logs, or "
            f"let the module compute alike for all values, sch['{module or 'path'}'].replace(...)",
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
        hint="slapo_core.verify(sch, batch) tells whether the model as it is does the same, or which step of the "
        "schedule is to blame; if it trains on this batch, an operation of torch takes less without memory (grouped "
        "products, as of experts: bfloat16 only)"
        if model is not None
        else None,
        location=location,
    )


def _module(error: Exception, model: nn.Module) -> str | None:
    """Path of the innermost module that was being called."""
    paths = {id(module): path for path, module in model.named_modules()}
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        path = paths.get(id(frame.f_locals.get("self")))
        found = path if path is not None else found
    return found


def _where(error: Exception) -> tuple[tuple[str, int] | None, str]:
    """The last line of the traceback that is neither torch's nor slapo's, and its text."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if os.path.isfile(frame.filename) and not os.path.abspath(frame.filename).startswith(_NOT_THE_USERS):
            return (frame.filename, frame.lineno or 0), linecache.getline(frame.filename, frame.lineno or 0).strip()
    return None, ""
