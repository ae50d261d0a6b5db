"""What a rank raised, as text; and what it means."""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Iterator
from typing import Any

__all__ = ["described"]

_NO_MEMORY = re.compile(r"can't allocate memory|not enough memory|cannot allocate memory|bad_alloc|out of memory", re.I)
_LOST = re.compile(r"gloo|nccl|connection (closed|reset|was aborted)|broken pipe", re.I)
_OURS = ("/slapo_tune/trials/", "/slapo_core/", "/torch/", "/importlib/", "<frozen ")
_FRAMES = 4
_LENGTH = 2000


def described(error: BaseException, phase: str) -> dict[str, Any]:
    """An exception as plain data.

    Args:
        error: what was raised.
        phase: what the rank did: ``"prepare"``, ``"batch"``, ``"model"``, ``"schedule"`` or ``"run"``.
    """
    return {
        "outcome": "raised",
        "phase": phase,
        "kind": type(error).__name__,
        "text": _text(error)[:_LENGTH],
        "where": _where(error),
        "no_memory": any(map(_says_no_memory, _chain(error))),
        "lost": any(map(_says_lost, _chain(error))),
        "differs": any(type(link).__name__ == "VerifyError" for link in _chain(error)),
    }


def _where(error: BaseException) -> list[str]:
    """The innermost lines that are the user's, the innermost last; all lines where none is."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not any(part in frame.filename for part in _OURS)] or frames
    return [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in theirs[-_FRAMES:]]


def _says_no_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(_text(error)) is not None


def _says_lost(error: BaseException) -> bool:
    """Whether it only says that another rank is gone."""
    return isinstance(error, (RuntimeError, ConnectionError)) and _LOST.search(_text(error)) is not None


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as inner:  # noqa: BLE001 - the class of a user: its own text is what fails
        return f"(its text cannot be had: {type(inner).__name__} in __str__)"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
