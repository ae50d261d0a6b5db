"""Where in the user's code a step was written."""

from __future__ import annotations

import os
import sys

_INSIDE = ("slapo_core", "contextlib")


def caller_location() -> str:
    """``"file.py:41"`` of the nearest frame outside of slapo_core, relative to the working directory if below it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in _INSIDE:
        frame = frame.f_back
    file = frame.f_code.co_filename
    here = os.getcwd() + os.sep
    return f"{file.removeprefix(here)}:{frame.f_lineno}"
