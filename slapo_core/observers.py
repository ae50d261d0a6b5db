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
    "compiles",
    "dropout_is_off",
    "goes_around",
    "happened",
    "is_inlined",
    "is_observed",
    "is_recording",
    "only_looks",
    "run_from",
    "spans_stages",
    "tell_verify",
    "watched",
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


def run_from(origin: Origin | None, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function of a hook, attributed to its origin where a run is attributed."""
    if origin is None or _attribute is None:
        return function(*args, **kwargs)
    return _attribute(origin, function, *args, **kwargs)


@contextmanager
def attributed(attribute: Callable[..., Any]) -> Iterator[None]:
    """Let ``attribute(origin, function, *args, **kwargs)`` make the calls of `run_from` in a block."""
    global _attribute
    before = _attribute
    _attribute = attribute if before is None else functools.partial(_attribute_twice, attribute, before)
    try:
        yield
    finally:
        _attribute = before


def _attribute_twice(
    inner: Callable[..., Any],
    outer: Callable[..., Any],
    origin: Origin,
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    return inner(origin, functools.partial(outer, origin, function), *args, **kwargs)


Event = Literal["call", "fallback", "compiled", "replay", "recomputation", "unseen"]
"""An event of a step: a call of what it put in, its fallback, a run of compiled code, of a CUDA graph, again; or a run
that differs because it is observed, and shows nothing."""

_watch: Callable[..., None] | None = None


def happened(event: Event, name: str = "", **facts: Any) -> None:
    """Report an event of a step's code to a block of :func:`watched`; without one this does nothing.

    Args:
        event: its kind.
        name: of the function that ran, as :class:`slapo_core.effects.Calls` names it; of a fallback, the reason; of a
            recomputation, the path of the module, or empty for a region; of compiled code, empty for a forward.
        facts: about it, e.g. ``graph_breaks=1``.
    """
    if _watch is not None:
        _watch(event, name, **facts)


@contextmanager
def watched(watch: Callable[..., None]) -> Iterator[None]:
    """Let ``watch(event, name, **facts)`` get the events of :func:`happened` in a block."""
    global _watch
    before = _watch
    _watch = watch if before is None else functools.partial(_watch_twice, watch, before)
    try:
        yield
    finally:
        _watch = before


def _watch_twice(inner: Callable[..., None], outer: Callable[..., None], event: Event, name: str, **facts: Any) -> None:
    inner(event, name, **facts)
    outer(event, name, **facts)


def is_observed() -> bool:
    """Return whether a block of :func:`watched` is open."""
    return _watch is not None


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


def compiles(wrapper: Callable[..., Any]) -> bool:
    """Return whether a wrapper compiles the forward given, with all that it calls (``slapo_compiles``)."""
    while isinstance(wrapper, functools.partial):
        wrapper = wrapper.func
    return getattr(wrapper, "slapo_compiles", False) is True


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
