"""Marks of hooks and wrappers, and the attribution of their calls to steps."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Literal, NamedTuple

__all__ = [
    "ONE_KERNEL",
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
    """The module and hook of a call that runs elsewhere, e.g. in a graph.

    Args:
        module: path of the module below the one that runs, or below the root.
        hook: the step's hook, or its wrapper.
        is_below_root: whether ``module`` is the path below the root.
    """

    module: str
    hook: Any
    is_below_root: bool = False


ONE_KERNEL = Origin("", "one kernel")
"""The origin of operations that a compiler makes one kernel of, where they run one by one on fake tensors."""

_attribute: Callable[..., Any] | None = None


def run_from(origin: Origin | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of a hook, attributed to its origin where a run is attributed."""
    if origin is None or _attribute is None:
        return function(*args, **kwargs)
    return _attribute(origin, function, *args, **kwargs)


@contextmanager
def attributed(attribute: Callable[..., Any]) -> Iterator[None]:
    """Let ``attribute(origin, function, *args, **kwargs)`` make the calls of `run_from` in a block."""
    global _attribute
    before, _attribute = _attribute, attribute
    try:
        yield
    finally:
        _attribute = before


def dropout_is_off() -> bool:
    """Whether ``verify`` has switched dropout off around this call.

    A torch-function mode does so, which sees calls made in Python. A kernel that drops elements itself must not do so
    while this is true.
    """
    from slapo_core.private import active_function_modes

    return any(getattr(mode, "slapo_switches_dropout_off", False) for mode in active_function_modes())


def tell_verify(note: str) -> bool:
    """Add a note to the report of ``verify``; return False outside of a run by ``verify``."""
    from slapo_core.private import active_function_modes

    lists = [mode.slapo_notes for mode in active_function_modes() if hasattr(mode, "slapo_notes")]
    for notes in lists:
        notes.append(note)
    return bool(lists)


def is_inlined(part: Any) -> bool:
    """Return whether a graph can hold a step's hook or forward (``slapo_is_inlined``).

    The mark of a function is the function itself, because ``functools.wraps`` copies marks onto wrappers.
    """
    mark = getattr(part, "slapo_is_inlined", False)
    return mark is part if isinstance(part, FunctionType) else bool(mark)


def is_recording() -> bool:
    """Return whether a recorder records this call."""
    from slapo_core.private import active_function_modes

    return any(getattr(mode, "slapo_is_recorder", False) for mode in active_function_modes())


def only_looks(hook: object) -> bool:
    """Return whether a hook only observes (``slapo_only_looks`` of its type)."""
    return getattr(type(hook), "slapo_only_looks", False) is True


def goes_around(wrapper: Callable[..., Any]) -> bool:
    """Return whether a wrapper fits around any forward (``slapo_goes_around`` of its function).

    It runs the forward given, whatever that computes; a kernel, which computes itself, does not.
    """
    while isinstance(wrapper, functools.partial):
        wrapper = wrapper.func
    return getattr(wrapper, "slapo_goes_around", False) is True


def spans_stages(wrapper: Callable[..., Any]) -> bool:
    """Return whether a wrapper of the root's forward can wrap each stage of a cut model instead.

    Its ``slapo_of_stage(is_last)`` returns the wrapper of a stage.
    """
    return hasattr(wrapper, "slapo_of_stage")


def withheld(value: object) -> str | None:
    """Return why an output has no values (``slapo_withheld`` of its type); None where it has.

    It has a shape, a type and a device, and can be kept in containers, moved and cast.
    """
    why: str | None = getattr(type(value), "slapo_withheld", None)
    return why
