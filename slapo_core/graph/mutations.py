"""Containers that a recorded forward changes: found out, and put back."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from slapo_core.graph.structure import Opaque, children
from slapo_core.spec.tracer import Untraceable

__all__ = ["is_unchanged", "put_back", "refusing_changes"]


def refusing_changes(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward``, refused if it changes a list or a dictionary that it is given, or calls itself: a graph would not.

    Args:
        forward: takes the module first.
    """
    is_running = False

    @functools.wraps(forward)
    def kept(module: Any, *args: Any, **kwargs: Any) -> Any:
        before = [(container, container.copy()) for value in (*args, *kwargs.values()) for container in _within(value)]
        nonlocal is_running
        if is_running:
            raise Untraceable("calls itself", _start(forward))
        is_running = True
        try:
            out = forward(module, *args, **kwargs)
        finally:
            is_running = False
        for container, copied in before:
            if not is_unchanged(container, copied):
                raise Untraceable(
                    f"changes the argument {_name(forward, module, args, kwargs, container)!r}", _start(forward)
                )
        return out

    return kept


def is_unchanged(container: Any, before: Any) -> bool:
    """Whether a list, dictionary or set holds the same objects as its copy ``before``."""
    if len(container) != len(before):
        return False
    if isinstance(container, set):
        return bool(container == before)
    if isinstance(container, dict):
        pairs = zip(container.items(), before.items(), strict=True)
        return all(key is other and item is old for (key, item), (other, old) in pairs)
    return all(one is other for one, other in zip(container, before, strict=True))


def put_back(container: Any, before: Any) -> None:
    """Give a container the contents of its copy again."""
    if not is_unchanged(container, before):
        container.clear()
        container.extend(before) if isinstance(container, list) else container.update(before)


def _within(value: Any) -> Iterator[Any]:
    if type(value) in (list, dict):
        yield value
    if type(value) is not Opaque and not hasattr(value, "shape"):
        for _, _, part in children(value) or ():
            yield from _within(part)


def _name(forward: Callable[..., Any], module: Any, args: Any, kwargs: Any, container: Any) -> str:
    given = inspect.signature(forward).bind(module, *args, **kwargs).arguments
    return next((name for name, value in given.items() if any(one is container for one in _within(value))), "?")


def _start(forward: Callable[..., Any]) -> tuple[str, int] | None:
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code is not None else None
