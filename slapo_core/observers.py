"""Hooks and wrappers of steps: their marks, carrying them over, and what recorders and observers of a run share."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import nn

    from slapo_core.tree.edit import Edit
    from slapo_core.tree.node import Node

__all__ = [
    "PATCHING",
    "Carried",
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
    "without",
]

HookKind = Literal["forward_pre", "forward", "full_backward_pre", "full_backward"]

Forward = Callable[..., Any]
"""An unbound forward: ``forward(module, *args, **kwargs)``."""

PATCHING = threading.RLock()
"""Held while classes of torch, classes of modules or global names are replaced for a run, and until they are back."""


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


@dataclass(frozen=True)
class Carried:
    """The hooks and wrappers of a module, in order, each active or not on this mesh.

    To be made before ``edit.replace_module``, and carried over after it::

        carried = Carried.of(node, new)
        edit.replace_module(node, new)
        carried.over(node, edit)
    """

    hooks: tuple[tuple[HookKind, Callable[..., Any], bool], ...]
    wrappers: tuple[tuple[Callable[[Forward], Forward], bool], ...]

    @classmethod
    def of(cls, node: Node, new: nn.Module, *, is_same: bool = False) -> Carried:
        """Collect the hooks and wrappers for calls of ``new``; none if it contains the old module.

        Args:
            node: the old module.
            new: what comes in its place.
            is_same: whether it computes the same from the same parameters, so that what steps wrapped around the
                forward fits whatever it does; otherwise only what goes around any forward (:func:`goes_around`).
        """
        if any(module is node.module for module in new.modules()):
            return cls((), ())
        active: tuple[Any, ...] = getattr(node.module.__dict__.get("forward"), "wrappers", ())
        wrappers = [wrapper for wrapper in node.wrappers if is_same or goes_around(wrapper)]
        return cls(tuple(_hooks(node)), tuple((each, any(each is other for other in active)) for each in wrappers))

    def over(self, node: Node, edit: Edit) -> None:
        """Add them to the current module at ``node``."""
        for kind, function, active in self.hooks:
            edit.add_hook(node, kind, function, active=active)
        for wrapper, active in self.wrappers:
            edit.wrap_forward(node, wrapper, active=active)


def _hooks(node: Node) -> Iterator[tuple[HookKind, Callable[..., Any], bool]]:
    from slapo_core.private import HOOK_TABLES, hooks_of

    old = node.module
    for kind, table in hooks_of(old).items():
        of_steps = [function for one, function in node.hooks if one == kind]
        inactive = without(of_steps, list(table.values()))
        for identity, function in table.items():
            if any(function is one for one in of_steps):  # those in front of it stay in front of it
                ahead = of_steps[: next(index for index, one in enumerate(of_steps) if one is function)]
                yield from ((kind, one, False) for one in inactive if any(one is other for other in ahead))
                inactive = without(inactive, ahead)
            if kind in ("forward_pre", "forward"):
                has_kwargs = identity in getattr(old, HOOK_TABLES[kind][1])
                function = _with_kwargs(function, has_kwargs, 2 if kind == "forward_pre" else 3)
            yield kind, function, True
        yield from ((kind, function, False) for function in inactive)


def without(functions: Sequence[Callable[..., Any]], others: Sequence[Callable[..., Any]]) -> list[Callable[..., Any]]:
    """``functions``, each of ``others`` taken out once."""
    left = list(others)
    kept = []
    for function in functions:
        position = next((index for index, other in enumerate(left) if other is function), None)
        if position is None:
            kept.append(function)
        else:
            del left[position]
    return kept


def _with_kwargs(function: Callable[..., Any], has_kwargs: bool, position: int) -> Callable[..., Any]:
    if has_kwargs:
        return function

    def hook(module: Any, args: Any, kwargs: Any, *output: Any) -> Any:
        result = function(module, args, *output)
        if result is None or position == 3:
            return result
        return (result if isinstance(result, tuple) else (result,)), kwargs

    return hook
