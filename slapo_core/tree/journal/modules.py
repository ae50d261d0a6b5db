"""Entries for modules: replaced, added, and their plain attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.parameter import is_lazy

from slapo_core.layout import Layout
from slapo_core.private import children_of, hooks_of
from slapo_core.tree.assignment import MISSING, Assignment, GradientHooks, ModuleHooks, hooks_of_user
from slapo_core.tree.index import full_name
from slapo_core.tree.journal.entry import JournalEntry

if TYPE_CHECKING:
    import torch
    from torch import nn

    from slapo_core.tree.tree import Tree


class ReplaceModule(JournalEntry):
    """Another module under every path of the old one.

    A tensor that both modules hold keeps its layout. Any other one of the same name, or of the
    name that ``moved`` gives, takes over its layout; the rest of the new module's tensors is added. Hooks move along,
    unless the new module contains the old one.
    """

    def __init__(self, tree: Tree, path: str, new: nn.Module, moved: dict[str, str], dropped: frozenset[str]) -> None:
        self.tree, self.new = tree, new
        self.old = tree.module_at(path)
        self.path = path = tree.index.path_of(self.old) or path  # another one, if an earlier edit moved it
        self.holders = [
            (tree.module_at(parent), name)
            for parent, _, name in (place.rpartition(".") for place in tree.index.paths_of(path))
        ]
        self.changed = tuple(parent for parent, _ in self.holders)
        table = tree.tensors
        before = {name: (tensor, table.layout(tensor, f"{path}.{name}")) for name, tensor in _named_tensors(self.old)}
        successor = {moved.get(name, name): layout for name, (_, layout) in before.items() if name not in dropped}
        # Hooks on a tensor move to its successor; a dropped tensor keeps its own.
        successors = dict(_named_tensors(new))
        kept = {id(tensor) for tensor in successors.values()}
        self.hooks = {
            name: GradientHooks(tensor, successors.get(moved.get(name, name)))
            for name, (tensor, _) in before.items()
            if name not in dropped and id(tensor) not in kept
        }
        self.contains_old = any(module is self.old for module in new.modules())
        self.module_hooks = None if self.contains_old else ModuleHooks(self.old, new)
        of_steps = [function for _, function in tree.calls.hooks(self.old)]
        registered = [function for table in hooks_of(self.old).values() for function in table.values()]
        self.hook_count = 0 if self.contains_old else len(of_steps) + len(hooks_of_user(registered, of_steps))
        self.assigned: list[tuple[torch.Tensor, Layout]] = []
        for name, tensor in _named_tensors(new):
            if not table.is_known(tensor):
                shape = () if is_lazy(tensor) else tuple(tensor.shape)
                self.assigned.append((tensor, successor.get(name) or Layout("", shape)))
        self.dropped = frozenset(before[name][1].origin for name in dropped if name in before)
        self.before: list[Layout | None] = []
        self.dropped_before: frozenset[str] = frozenset()

    def redo(self) -> None:
        self._set(self.new)
        self.tree.tensors.exchange(self.path, self.old, self.new)
        self.before = [self.tree.tensors.assign(tensor, layout) for tensor, layout in self.assigned]
        self.dropped_before = self.tree.tensors.drop(self.dropped)
        for hooks in self.hooks.values():
            hooks.carry()
        if self.module_hooks is not None:
            self.module_hooks.carry()
            self.tree.calls.exchange_hooks(self.old, self.new)

    def undo(self) -> None:
        if self.module_hooks is not None and self.module_hooks.take_back():
            self.tree.calls.exchange_hooks(self.old, self.new)
        self._set(self.old)
        self.tree.tensors.exchange(self.path, self.new, self.old)
        for hooks in self.hooks.values():
            hooks.take_back()
        for (tensor, _), layout in zip(self.assigned, self.before, strict=False):
            self.tree.tensors.assign(tensor, layout)
        self.tree.tensors.dropped = self.dropped_before

    def took_out(self, path: str) -> bool:
        """Return whether ``path`` was below the replaced module."""
        below = path.removeprefix(f"{self.path}.")
        if below == path:
            return False
        try:
            self.old.get_submodule(below)
        except AttributeError:
            return False
        return True

    def _set(self, module: nn.Module) -> None:
        for parent, name in self.holders:
            children_of(parent)[name] = module
        self.tree.structure_changed()

    def describe(self) -> str:
        moved = f", with its {self.hook_count} hooks" if self.hook_count else ""
        return f"module {type(self.old).__name__} -> {type(self.new).__name__}{moved}"


class AddModule(JournalEntry):
    """A new child of a module. The model's tensors in it become tied; the others are added."""

    def __init__(self, tree: Tree, parent: nn.Module, name: str, new: nn.Module) -> None:
        self.tree, self.parent, self.name, self.new = tree, parent, name, new
        self.changed = (parent,)
        self.assigned = [
            (tensor, Layout("", () if is_lazy(tensor) else tuple(tensor.shape)))
            for _, tensor in _named_tensors(new)
            if not tree.tensors.is_known(tensor)
        ]
        self.before: list[Layout | None] = []

    def redo(self) -> None:
        children_of(self.parent)[self.name] = self.new
        path = full_name(self.tree.index.path_of(self.parent) or "", self.name)
        self.tree.structure_changed()
        self.tree.tensors.exchange(path, None, self.new)
        self.before = [self.tree.tensors.assign(tensor, layout) for tensor, layout in self.assigned]

    def undo(self) -> None:
        children_of(self.parent).pop(self.name, None)
        self.tree.structure_changed()
        self.tree.tensors.exchange("", self.new, None)
        for (tensor, _), layout in zip(self.assigned, self.before, strict=False):
            self.tree.tensors.assign(tensor, layout)

    def describe(self) -> str:
        return f"module {self.name} added: {type(self.new).__name__}"


class SetAttribute(JournalEntry):
    """A plain attribute."""

    def __init__(self, tree: Tree, module: nn.Module, name: str, value: Any) -> None:
        self.tree, self.module, self.name, self.new = tree, module, name, value
        self.changed = (module,)
        self.old = module.__dict__.get(name, MISSING)
        self.assignment = Assignment(module, name)

    def redo(self) -> None:
        self.assignment.set(self.new)
        self.tree.attributes.append((self.module, self.name))

    def undo(self) -> None:
        self.assignment.undo()
        if (self.module, self.name) in self.tree.attributes:
            self.tree.attributes.remove((self.module, self.name))

    def describe(self) -> str:
        old, new = ("(none)" if value is MISSING else repr(value) for value in (self.old, self.new))
        if "\n" in old + new:  # a configuration
            return f"{self.name} replaced by another {type(self.new).__name__}"
        return f"{self.name} {old} -> {new}"


def _named_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    return [*parameters, *buffers]
