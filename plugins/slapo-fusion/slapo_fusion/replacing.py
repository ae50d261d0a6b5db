"""What stands in the way of putting another module in the place of one, and what goes over to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slapo_core import Edit, Node, Violation
from slapo_core.spec.edit import Forward, HookKind
from slapo_core.spec.node import only_looks

if TYPE_CHECKING:
    from torch import nn

__all__ = ["StepsChanges", "users_changes"]

_TABLES: dict[HookKind, str] = {
    "forward_pre": "_forward_pre_hooks",
    "forward": "_forward_hooks",
    "full_backward_pre": "_backward_pre_hooks",
    "full_backward": "_backward_hooks",
}


@dataclass(frozen=True)
class StepsChanges:
    """The hooks and wrapped forwards that steps put at a module: each with whether it runs on this mesh."""

    hooks: tuple[tuple[HookKind, Callable[..., Any], bool], ...]
    wrappers: tuple[tuple[Callable[[Forward], Forward], bool], ...]

    @classmethod
    def at(cls, node: Node) -> StepsChanges:
        module = node.module
        active = getattr(module.__dict__.get("forward"), "wrappers", ())
        return cls(
            tuple(
                (kind, function, any(function is one for one in getattr(module, _TABLES[kind]).values()))
                for kind, function in node.hooks
            ),
            tuple((wrapper, any(wrapper is one for one in active)) for wrapper in node.wrappers),
        )

    def carry(self, node: Node, edit: Edit) -> None:
        """Put them at the module that stands at ``node`` now."""
        for wrapper, is_active in self.wrappers:
            edit.wrap_forward(node, wrapper, active=is_active)
        for kind, function, is_active in self.hooks:
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
