"""What steps put around a module's forward, and what of it goes over to the module that comes in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slapo_core.spec.edit import Edit, Forward, HookKind, goes_around
from slapo_core.spec.node import Node

if TYPE_CHECKING:
    from torch import nn

__all__ = ["HOOK_TABLES", "Carried", "runs_own_forward", "without"]

HOOK_TABLES: dict[HookKind, str] = {
    "forward_pre": "_forward_pre_hooks",
    "forward": "_forward_hooks",
    "full_backward_pre": "_backward_pre_hooks",
    "full_backward": "_backward_hooks",
}
"""Where torch keeps the hooks of a module."""


@dataclass(frozen=True)
class Carried:
    """Hooks and wrapped forwards of a module, each with whether it is active on this mesh; in their order.

    To be made before ``edit.replace_module``, and carried over after it::

        carried = Carried.of(node, new)
        edit.replace_module(node, new)
        carried.over(node, edit)
    """

    hooks: tuple[tuple[HookKind, Callable[..., Any], bool], ...]
    wrappers: tuple[tuple[Callable[[Forward], Forward], bool], ...]

    @classmethod
    def of(cls, node: Node, new: nn.Module, *, is_same: bool = False) -> Carried:
        """What calls of ``new`` must still run, the user's hooks too; nothing where the old module lives on inside.

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
        """Put them at the module that stands at ``node`` now."""
        for kind, function, active in self.hooks:
            edit.add_hook(node, kind, function, active=active)
        for wrapper, active in self.wrappers:
            edit.wrap_forward(node, wrapper, active=active)


def runs_own_forward(node: Node) -> bool:
    """Whether the forward of the module's class runs when it is called, with nothing but what goes around any forward.

    What steps wrapped and is not active on this mesh counts too: a schedule is refused on every mesh, or on none.
    """
    forward = node.module.__dict__.get("forward")
    is_set = forward is not None and getattr(forward, "has_own", True)
    return node.graph is None and not is_set and all(map(goes_around, node.wrappers))


def _hooks(node: Node) -> Iterator[tuple[HookKind, Callable[..., Any], bool]]:
    old = node.module
    for kind, name in HOOK_TABLES.items():
        table: dict[int, Callable[..., Any]] = getattr(old, name)
        of_steps = [function for one, function in node.hooks if one == kind]
        inactive = without(of_steps, list(table.values()))
        for identity, function in table.items():
            if any(function is one for one in of_steps):  # those in front of it stay in front of it
                ahead = of_steps[: next(index for index, one in enumerate(of_steps) if one is function)]
                yield from ((kind, one, False) for one in inactive if any(one is other for other in ahead))
                inactive = without(inactive, ahead)
            if kind in ("forward_pre", "forward"):
                has_kwargs = identity in getattr(old, f"{name}_with_kwargs")
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
