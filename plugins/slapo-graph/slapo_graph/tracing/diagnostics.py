"""Locations in the model, and errors of recordings."""

from __future__ import annotations

import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from slapo_core.errors import SlapoError, TraceError
from slapo_graph.match import name_of
from slapo_graph.protocol import Location, Tracer, Untraceable

# Where in the model's source a recorded call was written.

_PACKAGES = ("slapo_core", "slapo_estimate", "slapo_graph", "slapo_runtime", "slapo_torch", "slapo_verify", "triton")
_SPECS = map(find_spec, _PACKAGES)
_NOT_THE_MODEL = (
    str(Path(torch.__file__).parent),
    *(str(Path(spec.origin).parent) + os.sep for spec in _SPECS if spec is not None and spec.origin),
    "<",
)


def is_of_the_model(file: str) -> bool:
    """Return whether a source file is neither torch's nor slapo's."""
    return not file.startswith(_NOT_THE_MODEL)


def model_location() -> Location:
    """Return the innermost line of the call stack outside of torch and slapo."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_of_the_model(file):
            return file, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return "<unknown>", 0


def first_line(function: Callable[..., Any]) -> Location | None:
    """Return the location of a function's source; None for builtins."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else (code.co_filename, code.co_firstlineno)


# The error for a module that cannot be traced.

_HINT = "trace a narrower node, or name the module that does this in leaves= (with flatten=True)"

_CACHE_HINT = (
    "call the model with use_cache=False (or set model.config.use_cache = False); for generate() with a cache, do not "
    "trace the module that fills it"
)


def refusal(error: Exception, tracer: Tracer, path: str) -> SlapoError:
    """Convert a tracer's exception to an error with location, reason and hint.

    Args:
        error: from :meth:`Tracer.trace`.
        tracer: that raised it.
        path: of the traced module.
    """
    where = name_of(path)
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
        location=raised_at(error),
        hint=_HINT,
    )


def raised_at(error: Exception) -> Location | None:
    """Return the innermost line of the model in the traceback."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return next(((file, line) for file, line in reversed(frames) if is_of_the_model(file)), None)
