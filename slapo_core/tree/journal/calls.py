"""What happens when a module is called: hooks, and wrappers around its forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from slapo_core.tree.assignment import MISSING
from slapo_core.tree.bound_forward import BoundForward
from slapo_core.tree.journal.entry import Entry, name_of

if TYPE_CHECKING:
    from slapo_core.spec.edit import Forward, HookKind

__all__ = ["AddHook", "WrapForward"]


_HOOK_TABLES: dict[str, tuple[str, tuple[str, ...]]] = {
    # kind: registration method, dictionaries it writes to
    "forward_pre": ("register_forward_pre_hook", ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")),
    "forward": (
        "register_forward_hook",
        ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    ),
    "full_backward_pre": ("register_full_backward_pre_hook", ("_backward_pre_hooks",)),
    "full_backward": ("register_full_backward_hook", ("_backward_hooks",)),
}


class AddHook(Entry):
    """A hook, put back at the same place among the user's own when redone."""

    def __init__(self, module: nn.Module, kind: HookKind, function: Callable[..., Any], prepend: bool) -> None:
        self.module, self.kind, self.function, self.prepend = module, kind, function, prepend
        self.register, self.tables = _HOOK_TABLES[kind]
        self.id: int | None = None
        self.full_backward_before = module._is_full_backward_hook
        self.taken: dict[str, _TakenHook] | None = None  # by table, after an undo

    def redo(self) -> None:
        if self.taken is not None:
            for table, taken in self.taken.items():
                taken.put_back(getattr(self.module, table))
            if self.kind == "full_backward":
                self.module._is_full_backward_hook = True
            return
        options = {"with_kwargs": True} if self.kind in ("forward_pre", "forward") else {}
        handle = getattr(self.module, self.register)(self.function, prepend=self.prepend, **options)
        self.id = handle.id

    def undo(self) -> None:
        if self.id is None:
            return
        hooks = {table: getattr(self.module, table) for table in self.tables}
        self.taken = {table: _TakenHook(own, self.id) for table, own in hooks.items() if self.id in own}
        if self.kind == "full_backward" and not self.module._backward_hooks:
            self.module._is_full_backward_hook = self.full_backward_before

    def describe(self) -> str:
        return f"{self.kind} hook {name_of(self.function)}"


class _TakenHook:
    """A hook taken out of one of torch's ordered dictionaries, and between which others it stood."""

    def __init__(self, hooks: dict[int, Any], identity: int) -> None:
        order = list(hooks)
        place = order.index(identity)
        self.before, self.after = order[:place], order[place + 1 :]
        self.identity, self.value = identity, hooks.pop(identity)

    def put_back(self, hooks: dict[int, Any]) -> None:
        """Behind the last of those that were before it; hooks that came or went since are left as they are."""
        order = list(hooks)
        ahead = [position for position, identity in enumerate(order) if identity in self.before]
        behind = [position for position, identity in enumerate(order) if identity in self.after]
        place = ahead[-1] + 1 if ahead else behind[0] if behind else len(order)
        items = list(hooks.items())
        items.insert(place, (self.identity, self.value))
        hooks.clear()
        hooks.update(items)


class WrapForward(Entry):
    """An instance-level forward around the present one."""

    def __init__(self, module: nn.Module, wrapper: Callable[[Forward], Forward]) -> None:
        self.module, self.wrapper = module, wrapper
        self.before = module.__dict__.get("forward", MISSING)
        self.bound: BoundForward | None = None

    def redo(self) -> None:
        if self.bound is None:
            self.bound = BoundForward(self.module, self.wrapper)
        self.module.__dict__["forward"] = self.bound

    def undo(self) -> None:
        if self.before is MISSING:
            self.module.__dict__.pop("forward", None)
        else:
            self.module.__dict__["forward"] = self.before

    def describe(self) -> str:
        return f"forward wrapped by {name_of(self.wrapper)}"
