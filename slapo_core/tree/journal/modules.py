"""Another module, and its plain attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.spec.layout import Layout
from slapo_core.tree.assignment import MISSING, Assignment
from slapo_core.tree.index import full_name
from slapo_core.tree.journal.entry import Entry

if TYPE_CHECKING:
    from slapo_core.tree.tree import Tree

__all__ = ["ReplaceModule", "SetAttribute"]


class ReplaceModule(Entry):
    """Another module under every path of the old one."""

    def __init__(self, tree: Tree, path: str, new: nn.Module, moved: dict[str, str], dropped: frozenset[str]) -> None:
        self.tree, self.path, self.new = tree, path, new
        self.old = tree.index.modules[path]
        self.holders = [
            (tree.module_at(parent), name)
            for parent, _, name in (place.rpartition(".") for place in tree.index.paths_of(path))
        ]
        prefix = f"{path}."
        below = {name: layout for name, layout in tree.layouts.items() if name.startswith(prefix)}
        arrived: dict[str, Layout | None] = {}
        for name, tensor in _named_tensors(self.old):
            if name in dropped:
                continue
            target = moved.get(name, name)
            layout = below.get(prefix + name)
            if layout is None and target != name:
                layout = Layout(prefix + name, tuple(tensor.shape))
            if layout is not None:
                arrived[prefix + target] = layout
        for name, tensor in _named_tensors(new):
            if name in dropped and prefix + name not in arrived:  # another tensor of the same name
                arrived[prefix + name] = Layout("", tuple(tensor.shape))
        self.old_layouts: dict[str, Layout | None] = dict.fromkeys(arrived) | below
        self.new_layouts: dict[str, Layout | None] = dict.fromkeys(below) | arrived
        # A module that stands in a second place has its canonical path there once the first is gone, or the reverse.
        self.elsewhere = [(name, tree.index.tensor_at(name), layout) for name, layout in tree.layouts.items()]
        self.arrived = arrived

    def redo(self) -> None:
        self._set(self.new)
        for name, tensor, layout in self.elsewhere:
            sites = [full_name(*site) for site in self.tree.sites.of(tensor)] if tensor is not None else []
            for other in {name, *sites} - self.arrived.keys():
                self.old_layouts.setdefault(other, self.tree.layouts.get(other))
                self.new_layouts[other] = layout if other in sites else None
        self.tree.set_layouts(self.new_layouts)

    def undo(self) -> None:
        self._set(self.old)
        self.tree.set_layouts(self.old_layouts)

    def _set(self, module: nn.Module) -> None:
        for parent, name in self.holders:
            parent._modules[name] = module
        self.tree.structure_changed()

    def describe(self) -> str:
        return f"module {type(self.old).__name__} -> {type(self.new).__name__}"


class SetAttribute(Entry):
    """A plain attribute."""

    def __init__(self, module: nn.Module, name: str, value: Any) -> None:
        self.module, self.name, self.new = module, name, value
        self.old = module.__dict__.get(name, MISSING)
        self.assignment = Assignment(module, name)

    def redo(self) -> None:
        self.assignment.set(self.new)

    def undo(self) -> None:
        self.assignment.undo()

    def describe(self) -> str:
        old = "(none)" if self.old is MISSING else repr(self.old)
        return f"{self.name} {old} -> {self.new!r}"


def _named_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    return [*parameters, *buffers]
