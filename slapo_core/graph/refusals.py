"""The error for a module that cannot be traced."""

from __future__ import annotations

import re
import traceback

from slapo_core.errors import SlapoError, TraceError
from slapo_core.graph.location import is_of_the_model
from slapo_core.spec.tracer import Location, Tracer, Untraceable

__all__ = ["refusal"]

_HINT = "trace a narrower node, or name the module that does this in leaves= (with flatten=True)"

_CACHE_HINT = (
    "call the model with use_cache=False (or set model.config.use_cache = False); for generate() with a cache, do not "
    "trace the module that fills it"
)


def refusal(error: Exception, tracer: Tracer, path: str) -> SlapoError:
    """What a tracer raised, as an error that says where, why, and what to try.

    Args:
        error: from :meth:`Tracer.trace`.
        tracer: which.
        path: of the traced module.
    """
    where = f"'{path}'" if path else "the root"
    if isinstance(error, Untraceable):
        message = f"{where} cannot be traced (tracer '{tracer.name}'): it {error.problem}"
        cache = _CACHE_HINT if re.search(r"\bof a \w*Cache$|into a \w*Cache$", error.problem) else None
        return TraceError(message, path=path, location=error.location, hint=error.hint or cache or _HINT)
    if isinstance(error, SlapoError):
        return error
    return TraceError(
        f"{where} cannot be traced: run by tracer '{tracer.name}', on tensors without values, it raises "
        f"{type(error).__name__}: {error}",
        path=path,
        location=_raised_at(error),
        hint=_HINT,
    )


def _raised_at(error: Exception) -> Location | None:
    """The innermost line of the model in the traceback."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return next(((file, line) for file, line in reversed(frames) if is_of_the_model(file)), None)
