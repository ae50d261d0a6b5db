"""What stands in the way of putting another module in the place of one, and what goes over to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from slapo_core import Edit, Node, Violation
from slapo_core.spec.edit import HookKind
from slapo_core.spec.node import only_looks

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Hook", "carry_hooks", "steps_hooks", "users_changes"]

Hook = tuple[HookKind, Callable[..., Any], bool]
"""Its kind, the function, and whether it runs on this mesh."""

_TABLES: dict[HookKind, str] = {
    "forward_pre": "_forward_pre_hooks",
    "forward": "_forward_hooks",
    "full_backward_pre": "_backward_pre_hooks",
    "full_backward": "_backward_hooks",
}


def steps_hooks(node: Node) -> tuple[Hook, ...]:
    """The hooks that steps put at the module, those of one kind in the order in which they run."""
    return tuple(
        (kind, function, any(function is one for one in getattr(node.module, _TABLES[kind]).values()))
        for kind, function in node.hooks
    )


def carry_hooks(hooks: tuple[Hook, ...], node: Node, edit: Edit) -> None:
    """Register what :func:`steps_hooks` gave before the module was replaced."""
    for kind, function, is_active in hooks:
        edit.add_hook(node, kind, function, active=is_active)


def users_changes(node: Node, doing: str) -> Iterator[Violation]:
    """Hooks and a forward that the user set: they would be lost with the module.

    Args:
        node: the module.
        doing: the step, e.g. ``"decompose"``.
    """
    module: nn.Module = node.module
    known = [function for _, function in node.hooks]
    for table in _TABLES.values():
        for hook in getattr(module, table).values():
            if not only_looks(hook) and not any(hook is one for one in known):
                yield Violation(
                    f"the module has the hook {getattr(hook, '__qualname__', hook)!r}, set outside of the schedule, "
                    "which would be lost",
                    f"register it after .{doing}(), on the module that stands there then",
                )
    if "forward" in module.__dict__ and not node.wrappers and node.graph is None:
        yield Violation(
            "the module's forward was set outside of the schedule, and would be lost",
            "set it in a class instead",
        )
