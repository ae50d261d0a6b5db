"""Where in the model's source a recorded call was written."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

__all__ = ["Location", "model_location"]

Location = tuple[str, int]
"""File and line."""

_NOT_THE_MODEL = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_LIBRARIES = (str(Path(__file__).parent.parent),)


def model_location() -> Location:
    """The innermost line of the call stack that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_THE_MODEL) and not file.startswith(_LIBRARIES) and not file.startswith("<"):
            return file, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return "<unknown>", 0
