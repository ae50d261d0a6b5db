"""Notify observers of a run about code that hides its torch calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

__all__ = ["Origin", "attributed", "dropout_is_off", "run_from"]


class Origin(NamedTuple):
    """Where a call in a graph comes from that a step's hook made.

    Args:
        module: path of the hooked module below the recorded one.
        hook: the hook.
    """

    module: str
    hook: Any


_attribute: Callable[..., Any] | None = None


def run_from(origin: Origin | None, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function`` with ``args``, code of a hook; who attributes what runs is told whose."""
    if origin is None or _attribute is None:
        return function(*args)
    return _attribute(origin, function, *args)


@contextmanager
def attributed(attribute: Callable[..., Any]) -> Iterator[None]:
    """While this lasts, ``attribute(origin, function, *args)`` makes the calls that a graph holds of steps' hooks."""
    global _attribute
    before, _attribute = _attribute, attribute
    try:
        yield
    finally:
        _attribute = before


def dropout_is_off() -> bool:
    """Whether ``verify`` has switched dropout off around this call.

    It does so by a torch-function mode, which sees what Python calls. Code that calls nothing, such as a kernel that
    drops elements itself, has to leave that out while this is true.
    """
    from slapo_core.private import active_function_modes

    return any(getattr(mode, "slapo_switches_dropout_off", False) for mode in active_function_modes())
