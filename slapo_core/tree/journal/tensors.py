"""Entries for parameters and buffers: replaced, laid out, annotated, frozen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slapo_core.errors import ApplyError
from slapo_core.layout import Layout
from slapo_core.private import buffers_of, parameters_of
from slapo_core.tree.assignment import MISSING, Assignment, GradientHooks
from slapo_core.tree.index import full_name
from slapo_core.tree.journal.entry import JournalEntry

if TYPE_CHECKING:
    import torch
    from torch import nn

    from slapo_core.tree.tree import Tree

Sites = tuple[tuple[str, str], ...]


class SetTensor(JournalEntry):
    """Another parameter or buffer object in every place that holds the old one.

    Args:
        tree: the tree.
        sites: ``(module path, own name)`` of each place.
        old: what stands there; None for an empty slot.
        new: what comes there; None empties the slot.
        layout: of ``new``; None: a tensor of the model keeps its own, and another one takes over that of ``old``.
    """

    def __init__(
        self, tree: Tree, sites: Sites, old: torch.Tensor | None, new: torch.Tensor | None, layout: Layout | None
    ) -> None:
        self.tree, self.sites, self.old, self.new = tree, sites, old, new
        self.holders = [Assignment(tree.index.modules[path], name) for path, name in sites]
        self.changed = tuple(holder.module for holder in self.holders)
        # Attributes that the model's author or ``annotate`` set on the old object move to the new one, until ``undo``.
        self.carried = _attributes_to_carry(old, new)
        self.hooks = GradientHooks(old, new)
        former = tree.tensors.layout(old, full_name(*sites[0])) if old is not None else None
        self.layout, self.dropped = layout, tuple[str, ...]()
        if new is not None and layout is None and not tree.tensors.is_known(new):
            self.layout = former or Layout("", tuple(new.shape))
        elif former is not None and layout is None:
            own = tree.tensors.layout(new, "").origin if new is not None else None
            self.dropped = (former.origin,) if own != former.origin else ()
        self.before: Layout | None = None
        self.dropped_before: frozenset[str] = frozenset()
        self.put_over: dict[int, torch.Tensor | None] = {}  # by holder: tensors set over it meanwhile

    def redo(self) -> None:
        table = self.tree.tensors
        if self.new is not None:
            self.new.__dict__.update(self.carried)
        self.hooks.carry()
        for position, holder in enumerate(self.holders):
            # By attribute and not into the dictionary: nn.LSTM keeps further references.
            holder.set(self.put_over.get(position, self.new))
        self.tree.sites.move(self.old, self.new, self.sites)
        if self.new is not None and self.layout is not None:
            self.before = table.assign(self.new, self.layout)
        self.dropped_before = table.drop(self.dropped)

    def undo(self) -> None:
        for holder, site in zip(self.holders, self.sites, strict=True):
            if not any(holder.name in table for table in (parameters_of(holder.module), buffers_of(holder.module))):
                raise ApplyError(
                    f"'{full_name(*site)}' is no longer a parameter or buffer (it may have been parametrized)"
                )
        present = {place: holder.present() for place, holder in enumerate(self.holders)}
        self.put_over = {place: tensor for place, tensor in present.items() if tensor is not self.new}
        for holder in reversed(self.holders):
            holder.undo()
        for key in self.carried:
            self.new.__dict__.pop(key, None)
        self.hooks.take_back()
        self.tree.sites.move(self.new, self.old, self.sites)
        if self.new is not None and self.layout is not None:
            self.tree.tensors.assign(self.new, self.before)
        self.tree.tensors.dropped = self.dropped_before

    def describe(self) -> str:
        (_, name), *others = self.sites
        shapes = [tuple(tensor.shape) if tensor is not None else None for tensor in (self.old, self.new)]
        change = f"{shapes[0]} -> {shapes[1]}" if shapes[0] != shapes[1] else f"{shapes[0]}, other values"
        layout = self.layout
        tied = f", tied with {', '.join(full_name(*site) for site in others)}" if others else ""
        return f"{name} {change}" + (f", {layout}" if layout and layout.placements else "") + tied


class SetLayout(JournalEntry):
    """The layout of a tensor that itself stays: a split over a mesh dimension of one rank."""

    def __init__(self, tree: Tree, name: str, tensor: torch.Tensor, layout: Layout) -> None:
        self.tree, self.name, self.tensor, self.layout = tree, name, tensor, layout
        self.before: Layout | None = None

    def redo(self) -> None:
        self.before = self.tree.tensors.assign(self.tensor, self.layout)

    def undo(self) -> None:
        self.tree.tensors.assign(self.tensor, self.before)

    def describe(self) -> str:
        return f"{self.name} {tuple(self.tensor.shape)} stays, {self.layout}"


class AnnotateParameter(JournalEntry):
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


class SetRequiresGrad(JournalEntry):
    """Whether a parameter is trained."""

    def __init__(self, tree: Tree, parameter: nn.Parameter, sites: Sites, flag: bool) -> None:
        self.tree, self.parameter, self.new = tree, parameter, flag
        self.old, self.name = parameter.requires_grad, sites[0][1]
        own = full_name(*sites[0])
        self.key = tree.tensors.layout(parameter, own).origin or own
        self.before = tree.tensors.trained

    def redo(self) -> None:
        self.parameter.requires_grad_(self.new)
        self.before = self.tree.tensors.trained
        self.tree.tensors.trained = {**self.before, self.key: self.new}

    def undo(self) -> None:
        self.parameter.requires_grad_(self.old)
        self.tree.tensors.trained = self.before

    def describe(self) -> str:
        return f"{self.name} {'is trained' if self.new else 'is frozen'}"


def _attributes_to_carry(old: torch.Tensor | None, new: torch.Tensor | None) -> dict[str, Any]:
    if old is None or new is None or new is old:
        return {}
    return {key: value for key, value in old.__dict__.items() if key not in new.__dict__}
