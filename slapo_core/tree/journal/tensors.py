"""Another parameter or buffer object, its attributes, and whether it is trained."""

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

__all__ = ["Annotate", "SetRequiresGrad", "SetTensor"]


class SetTensor(Entry):
    """Another parameter or buffer object in every place that holds the old one."""

    def __init__(
        self,
        tree: Tree,
        sites: tuple[tuple[str, str], ...],
        old: torch.Tensor | None,
        new: torch.Tensor | None,
        layout: Layout | None,
    ) -> None:
        self.tree, self.sites, self.old, self.new = tree, sites, old, new
        self.holders = [Assignment(tree.index.modules[path], name) for path, name in sites]
        # What the model's author or ``annotate`` set on the old object goes with it, and goes away again with ``undo``.
        self.carried = _attributes_to_carry(old, new)
        names = [full_name(path, name) for path, name in sites]
        self.old_layouts = {name: tree.layouts.get(name) for name in names}
        self.new_layouts = {name: layout or self.old_layouts[name] for name in names}

    def redo(self) -> None:
        if self.new is not None:
            self.new.__dict__.update(self.carried)
        for holder in self.holders:
            # By attribute and not into the dictionary: modules such as nn.LSTM keep further references.
            holder.set(self.new)
        self.tree.sites.move(self.old, self.new, self.sites)
        self.tree.set_layouts(self.new_layouts)

    def undo(self) -> None:
        for holder in reversed(self.holders):
            holder.undo()
        for key in self.carried:
            self.new.__dict__.pop(key, None)
        self.tree.sites.move(self.new, self.old, self.sites)
        self.tree.set_layouts(self.old_layouts)

    def describe(self) -> str:
        (_, name), *others = self.sites
        shapes = [tuple(tensor.shape) if tensor is not None else None for tensor in (self.old, self.new)]
        change = f"{shapes[0]} -> {shapes[1]}" if shapes[0] != shapes[1] else f"{shapes[0]}, other values"
        layout = self.new_layouts[full_name(*self.sites[0])]
        tied = f", tied with {', '.join(full_name(*site) for site in others)}" if others else ""
        return f"{name} {change}" + (f", {layout}" if layout and layout.placements else "") + tied


class Annotate(Entry):
    """An attribute of a parameter object."""

    def __init__(self, tensor: torch.Tensor, name: str, key: str, value: Any) -> None:
        self.tensor, self.name, self.key, self.new = tensor, name, key, value
        self.old = tensor.__dict__.get(key, MISSING)

    def redo(self) -> None:
        setattr(self.tensor, self.key, self.new)

    def undo(self) -> None:
        if self.old is MISSING:
            self.tensor.__dict__.pop(self.key, None)
        else:
            self.tensor.__dict__[self.key] = self.old

    def describe(self) -> str:
        return f"{self.name}.{self.key} = {self.new!r}"


class SetRequiresGrad(Entry):
    """Whether a parameter is trained."""

    def __init__(self, tree: Tree, parameter: nn.Parameter, sites: tuple[tuple[str, str], ...], flag: bool) -> None:
        self.tree, self.parameter, self.new = tree, parameter, flag
        self.old = parameter.requires_grad
        self.name = sites[0][1]
        self.before = {full_name(*site): tree.trainable.get(full_name(*site)) for site in sites}

    def redo(self) -> None:
        self.parameter.requires_grad_(self.new)
        self.tree.set_trainable(dict.fromkeys(self.before, self.new))

    def undo(self) -> None:
        self.parameter.requires_grad_(self.old)
        self.tree.set_trainable(self.before)

    def describe(self) -> str:
        return f"{self.name} {'is trained' if self.new else 'is frozen'}"


def _attributes_to_carry(old: torch.Tensor | None, new: torch.Tensor | None) -> dict[str, Any]:
    if old is None or new is None or new is old:
        return {}
    return {key: value for key, value in old.__dict__.items() if key not in new.__dict__}
