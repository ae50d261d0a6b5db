"""Where in the model's source a recorded call was written."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from slapo_core.spec.tracer import Location

__all__ = ["first_line", "is_of_the_model", "model_location"]

_NOT_THE_MODEL = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), "<")


def is_of_the_model(file: str) -> bool:
    """Whether a source file is neither torch's nor ours."""
    return not file.startswith(_NOT_THE_MODEL)


def model_location() -> Location:
    """The innermost line of the call stack that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_of_the_model(file):
            return file, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return "<unknown>", 0


def first_line(function: Callable[..., Any]) -> Location | None:
    """Where a function is written; None for one that is not written in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else (code.co_filename, code.co_firstlineno)
