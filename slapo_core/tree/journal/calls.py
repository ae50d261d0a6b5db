"""Journal entries of a module's call: hooks, wrappers around its forward, its graph."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

from slapo_core.private import HOOK_TABLES, full_backward_flag, hooks_of, set_full_backward_flag
from slapo_core.tree.forward import CallChange, Calls, ModuleForward, Wrapping
from slapo_core.tree.journal.entry import Entry, name_of

if TYPE_CHECKING:
    from torch import nn

    from slapo_core.edit import Forward, HookKind
    from slapo_graph.match import Graph


class AddHook(Entry):
    """A hook, put back at the same place among the user's own when redone.

    Args:
        calls: where it is noted.
        module: which gets it.
        kind: of the hook.
        function: the hook.
        prepend: whether it runs before those that are there.
        active: whether torch is told of it.
    """

    def __init__(
        self, calls: Calls, module: nn.Module, kind: HookKind, function: Callable[..., Any], prepend: bool, active: bool
    ) -> None:
        self.calls, self.module, self.kind, self.function = calls, module, kind, function
        self.prepend, self.active = prepend, active
        self.change = CallChange(kind, function)
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

    @property
    def changed(self) -> tuple[nn.Module, ...]:
        return (self.module,) if self.active else ()

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


class TakenHook:
    """A hook removed from one of torch's ordered dictionaries, and its neighbors."""

    def __init__(self, hooks: dict[int, Any], identity: int) -> None:
        order = list(hooks)
        place = order.index(identity)
        self.before, self.after = order[:place], order[place + 1 :]
        self.identity, self.value = identity, hooks.pop(identity)

    def put_back(self, hooks: dict[int, Any]) -> None:
        """Insert it behind the last of those that were before it; others stay as they are."""
        order = list(hooks)
        ahead = [position for position, identity in enumerate(order) if identity in self.before]
        behind = [position for position, identity in enumerate(order) if identity in self.after]
        place = ahead[-1] + 1 if ahead else behind[0] if behind else len(order)
        items = list(hooks.items())
        items.insert(place, (self.identity, self.value))
        hooks.clear()
        hooks.update(items)


class WrapForward(Entry):
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
        calls: Calls,
        module: nn.Module,
        wrapper: Callable[[Forward], Forward],
        active: bool,
        inside: bool = False,
    ) -> None:
        self.calls, self.module, self.wrapper, self.active, self.inside = calls, module, wrapper, active, inside
        self.change = CallChange("wrapper", wrapper)
        self.wrapping = Wrapping(wrapper)
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

    @property
    def changed(self) -> tuple[nn.Module, ...]:
        return (self.module,) if self.active else ()

    def describe(self) -> str:
        return f"forward wrapped by {name_of(self.wrapper)}{_if_inactive(self.active)}"


class SetGraph(Entry):
    """A static graph in place of the forward; wrappers stay around the graph.

    Args:
        calls: where it is noted.
        module: whose forward it is.
        graph: called like the forward, with the module first.
    """

    def __init__(self, calls: Calls, module: nn.Module, graph: Graph) -> None:
        self.calls, self.module, self.graph = calls, module, graph
        self.base = MethodType(graph, module)
        self.graph_before: Graph | None = None
        self.base_before: Any = None
        self.forward: ModuleForward | None = None
        self.was_in_place = True

    def redo(self) -> None:
        if self.forward is None or (self.was_in_place and not self.forward.is_in_place):
            self.forward = ModuleForward.of(self.module)
        self.base_before = self.forward.set_base(self.base)
        self.graph_before = self.calls.set_graph(self.module, self.graph)

    def undo(self) -> None:
        if self.forward is None:
            return
        self.was_in_place = self.forward.is_in_place
        self.forward.set_base(self.base_before)
        self.calls.set_graph(self.module, self.graph_before)

    @property
    def changed(self) -> tuple[nn.Module, ...]:
        return (self.module,)

    def describe(self) -> str:
        return f"forward runs {self.graph!r}"


def _if_inactive(active: bool) -> str:
    return "" if active else ", inactive (nothing to do on this mesh)"
