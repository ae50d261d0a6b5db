"""Functions in a saved schedule: by name, and only those that are there without importing anything."""

from __future__ import annotations

import re
import sys
from types import FunctionType
from typing import Any

from slapo_core.errors import ReplayError

_FUNCTION_NAME = re.compile(r"[^:]+:[^\W\d]\w*")


def is_function_name(text: Any) -> bool:
    """Whether a saved argument names a function, ``"module:name"``, and is no text of its own (``"inductor"``)."""
    return isinstance(text, str) and _FUNCTION_NAME.fullmatch(text) is not None


def name_of_function(value: Any) -> str | None:
    """``"module:name"`` of a function at the top level of a module; None where that name leads to anything else."""
    if not isinstance(value, FunctionType):
        return None
    module = sys.modules.get(value.__module__)
    found: Any = vars(module).get(value.__qualname__) if module is not None else None
    return f"{value.__module__}:{value.__qualname__}" if found is value else None


def find_function(name: str, *, where: str) -> Any:
    """The function that `name_of_function` named.

    Nothing is imported: that would run code which a document chooses, and documents may come from anywhere.

    Raises:
        ReplayError: the module is not imported, or has no such function.
    """
    module, _, own = name.partition(":")
    if module not in sys.modules:
        raise ReplayError(
            f"{where} is the function '{name}', and the module {module} is not imported",
            hint=f"`import {module}` before replaying, if you trust the schedule: replay imports nothing by itself",
        )
    function: Any = vars(sys.modules[module]).get(own)
    if name_of_function(function) != name:
        raise ReplayError(
            f"{where} is the function '{name}', and the module {module} has no such function",
            hint="replay with the version of the module that the schedule was saved with",
        )
    return function
