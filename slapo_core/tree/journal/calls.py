"""Entries for calls of modules: hooks, wrappers, forwards, state that steps keep."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

from slapo_core.private import HOOK_TABLES, full_backward_flag, hooks_of, set_full_backward_flag
from slapo_core.tree.assignment import TakenHook
from slapo_core.tree.forward import FORWARD, AppliedWrapper, CallTable, HookOrWrapper, ModuleForward, ReplacedForward
from slapo_core.tree.journal.entry import JournalEntry

if TYPE_CHECKING:
    from torch import nn

    from slapo_core.observers import Forward, HookKind


class AddHook(JournalEntry):
    """A hook, put back at the same place among the user's own when redone.

    Args:
        calls: where it is noted.
        module: its module.
        kind: of the hook.
        function: the hook.
        prepend: whether it runs before those that are there.
        active: whether it is registered.
    """

    def __init__(
        self,
        calls: CallTable,
        module: nn.Module,
        kind: HookKind,
        function: Callable[..., Any],
        prepend: bool,
        active: bool,
    ) -> None:
        self.calls, self.module, self.kind, self.function = calls, module, kind, function
        self.prepend, self.active = prepend, active
        self.changed = (module,) if active else ()
        self.change = HookOrWrapper(kind, function)
        self.register, self.tables = f"register_{kind}_hook", HOOK_TABLES[kind]
        self.id: int | None = None
        self.full_backward_before = full_backward_flag(module)
        self.taken: dict[str, TakenHook] | None = None  # by table, after an undo

    def redo(self) -> None:
        if self.active:
            self._register()
        self.calls.add(self.module, self.change, first=self.prepend)

    def undo(self) -> None:
        self.calls.remove(self.module, self.change)
        if self.id is None:
            return
        hooks = {table: getattr(self.module, table) for table in self.tables}
        self.taken = {table: TakenHook(own, self.id) for table, own in hooks.items() if self.id in own}
        if self.kind == "full_backward" and not hooks_of(self.module)["full_backward"]:
            set_full_backward_flag(self.module, self.full_backward_before)

    def describe(self) -> str:
        return f"{self.kind} hook {name_of(self.function)}{_if_inactive(self.active)}"

    def _register(self) -> None:
        if self.taken is not None:
            for table, taken in self.taken.items():
                taken.put_back(getattr(self.module, table))
            if self.kind == "full_backward":
                set_full_backward_flag(self.module, True)
            return
        options = {"with_kwargs": True} if self.kind in ("forward_pre", "forward") else {}
        handle = getattr(self.module, self.register)(self.function, prepend=self.prepend, **options)
        self.id = handle.id


class WrapForward(JournalEntry):
    """A wrapper around the present forward.

    Args:
        calls: where it is noted.
        module: whose forward it is.
        wrapper: makes the new forward of the present one.
        active: whether calls go through it.
        inside: within the wrappers that are there.
    """

    def __init__(
        self,
        calls: CallTable,
        module: nn.Module,
        wrapper: Callable[[Forward], Forward],
        active: bool,
        inside: bool = False,
    ) -> None:
        self.calls, self.module, self.wrapper, self.active, self.inside = calls, module, wrapper, active, inside
        self.changed = (module,) if active else ()
        self.change = HookOrWrapper("wrapper", wrapper)
        self.wrapping = AppliedWrapper(wrapper)
        self.forward: ModuleForward | None = None
        self.was_in_place = True

    def redo(self) -> None:
        if self.active:
            # A forward set while this step was undone is what the wrapper wraps now.
            if self.forward is None or (self.was_in_place and not self.forward.is_in_place):
                self.forward = ModuleForward.of(self.module)
            self.forward.add(self.wrapping, inside=self.inside)
        self.calls.add(self.module, self.change, first=self.inside)

    def undo(self) -> None:
        self.calls.remove(self.module, self.change)
        if self.forward is not None:
            self.was_in_place = self.forward.is_in_place
            self.forward.remove(self.wrapping)

    def describe(self) -> str:
        return f"forward wrapped by {name_of(self.wrapper)}{_if_inactive(self.active)}"


class SetForward(JournalEntry):
    """A function in place of the forward; wrappers stay around it.

    Args:
        calls: where it is noted.
        module: whose forward it is.
        new: called like the forward, with the module first.
    """

    def __init__(self, calls: CallTable, module: nn.Module, new: Forward) -> None:
        self.calls, self.module, self.new = calls, module, new
        self.changed = (module,)
        self.base = MethodType(new, module)
        self.old: Any = None
        self.base_before: Any = None
        self.forward: ModuleForward | None = None
        self.was_in_place = True

    def redo(self) -> None:
        if self.forward is None or (self.was_in_place and not self.forward.is_in_place):
            self.forward = ModuleForward.of(self.module)
        self.base_before = self.forward.set_base(self.base)
        self.old = self.calls.set_state(self.module, FORWARD, self.new)

    def undo(self) -> None:
        if self.forward is None:
            return
        self.was_in_place = self.forward.is_in_place
        self.forward.set_base(self.base_before)
        self.calls.set_state(self.module, FORWARD, self.old)

    def describe(self) -> str:
        return f"forward runs {repr(self.new) if isinstance(self.new, ReplacedForward) else name_of(self.new)}"


class SetState(JournalEntry):
    """A value that a plugin keeps for a module."""

    def __init__(self, calls: CallTable, module: nn.Module, key: str, value: Any) -> None:
        self.calls, self.module, self.key, self.new = calls, module, key, value
        self.old: Any = None

    def redo(self) -> None:
        self.old = self.calls.set_state(self.module, self.key, self.new)

    def undo(self) -> None:
        self.calls.set_state(self.module, self.key, self.old)

    def describe(self) -> str:
        return f"state '{self.key}': {self.new!r}"


def _if_inactive(active: bool) -> str:
    return "" if active else ", inactive (nothing to do on this mesh)"


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's readable name: ``"checkpointed"``, also of a ``functools.partial``."""
    function = getattr(function, "func", function)  # functools.partial
    name: str = getattr(function, "__qualname__", None) or type(function).__qualname__
    return name.replace(".<locals>", "")
