"""Hooks and wrappers of steps: their marks, and what recorders and observers of a run share."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Literal, NamedTuple

__all__ = [
    "PATCHING",
    "Forward",
    "HookKind",
    "Origin",
    "attributed",
    "dropout_is_off",
    "goes_around",
    "is_inlined",
    "is_recording",
    "only_looks",
    "run_from",
    "spans_stages",
    "tell_verify",
    "withheld",
]

HookKind = Literal["forward_pre", "forward", "full_backward_pre", "full_backward"]

Forward = Callable[..., Any]
"""An unbound forward: ``forward(module, *args, **kwargs)``."""

PATCHING = threading.RLock()
"""Held while classes of torch, classes of modules or global names are replaced for a run, and until they are back."""


class Origin(NamedTuple):
    """Where a call comes from that code of a step makes elsewhere: in a graph, or after its module's forward.

    Args:
        module: path of the module below the one that runs, or below the root.
        hook: the step's hook, or its wrapper.
        is_below_root: whether ``module`` is the path below the root.
    """

    module: str
    hook: Any
    is_below_root: bool = False


_attribute: Callable[..., Any] | None = None


def run_from(origin: Origin | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, code of a hook; who attributes what runs is told whose."""
    if origin is None or _attribute is None:
        return function(*args, **kwargs)
    return _attribute(origin, function, *args, **kwargs)


@contextmanager
def attributed(attribute: Callable[..., Any]) -> Iterator[None]:
    """While this lasts, ``attribute(origin, function, *args, **kwargs)`` makes the calls of `run_from`."""
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


def tell_verify(note: str) -> bool:
    """Note in the report of ``verify`` what a step did not do; return False outside of a run by ``verify``."""
    from slapo_core.private import active_function_modes

    lists = [mode.slapo_notes for mode in active_function_modes() if hasattr(mode, "slapo_notes")]
    for notes in lists:
        notes.append(note)
    return bool(lists)


def is_inlined(part: Any) -> bool:
    """Return whether a graph can hold a step's hook or forward (``slapo_is_inlined``).

    Of a function the mark is the function itself: ``functools.wraps`` copies marks onto what is wrapped around it.
    """
    mark = getattr(part, "slapo_is_inlined", False)
    return mark is part if isinstance(part, FunctionType) else bool(mark)


def is_recording() -> bool:
    """Whether a recorder writes down what runs now."""
    from slapo_core.private import active_function_modes

    return any(getattr(mode, "slapo_is_recorder", False) for mode in active_function_modes())


def only_looks(hook: object) -> bool:
    """Return whether a hook is slapo-core's own and changes nothing."""
    return getattr(type(hook), "slapo_only_looks", False) is True


def goes_around(wrapper: Callable[..., Any]) -> bool:
    """Return whether a wrapper fits around any forward, because it runs the forward given.

    Its function says so by ``slapo_goes_around = True``; what computes something itself (a kernel) does not.
    """
    while isinstance(wrapper, functools.partial):
        wrapper = wrapper.func
    return getattr(wrapper, "slapo_goes_around", False) is True


def spans_stages(wrapper: Callable[..., Any]) -> bool:
    """Return whether a wrapper of the root's forward can go around each stage of a cut model instead.

    It has ``slapo_of_stage(is_last) -> wrapper``, whose result wraps what a stage computes.
    """
    return hasattr(wrapper, "slapo_of_stage")


def withheld(value: object) -> str | None:
    """Return why a step gives no values for an output (``slapo_withheld`` of its type); None where they are there.

    Such an output has a shape, a type and a device, and can be carried: kept in containers, moved and cast.
    """
    why: str | None = getattr(type(value), "slapo_withheld", None)
    return why
