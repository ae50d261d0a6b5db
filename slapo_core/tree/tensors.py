"""Which tensor of the untouched model each live one stands for: the one truth about tensors, by identity.

A tensor that no step changed stands for itself, wherever the model holds it, so that ties, aliases, moved modules and
undo need no bookkeeping. A tensor that a step made has the layout that the step recorded. What no tensor stands for any
more is either recorded as dropped, or as kept on other ranks; nothing is concluded from absence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from torch.nn.parameter import is_lazy

from slapo_core.spec.layout import Layout
from slapo_core.tree.index import full_name

if TYPE_CHECKING:
    import torch

    from slapo_core.spec.placement import Placement
    from slapo_core.tree.tree import Tree

__all__ = ["TensorTable"]


class TensorTable:
    """Made with the tree; written by journal entries, read by everybody.

    Args:
        tree: whose tensors these are.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._untouched: dict[int, tuple[torch.Tensor, str]] | None = None  # None: no step yet, all is untouched
        self._names: dict[str, str] = {}  # every name of the untouched model -> the first name of its tensor
        self._layouts: dict[int, tuple[torch.Tensor, Layout]] = {}
        self._shapes: dict[int, tuple[torch.Tensor, tuple[int, ...]]] = {}
        self.dropped: frozenset[str] = frozenset()
        """First names of untouched tensors that a step gave up."""
        self.kept_on: Mapping[str, tuple[str, int]] = {}
        """First names of untouched tensors that live on one rank of a mesh dimension: ``{"fc.weight": ("pp", 1)}``."""
        self.placement: Placement | None = None
        """Where tensors live along ``pp``, once ``build`` has decided it; other ranks have stand-ins without memory."""
        self.trained: Mapping[str, bool] = {}
        """Whether a parameter is trained, by first name, only where a step decided it."""
        self.trained_at_first: Mapping[str, bool] = {}
        """Whether a parameter of the untouched model was trained before the first step, by first name."""

    # -- reading ----------------------------------------------------------------------------------------------

    def layout(self, tensor: torch.Tensor, name: str) -> Layout:
        """The layout of a live tensor.

        Args:
            tensor: a parameter or buffer of the model.
            name: a full name of it.
        """
        entry = self._layouts.get(id(tensor))
        if entry is not None:
            return entry[1]
        if self._untouched is None:
            sites = self._tree.sites.of(tensor)
            return Layout(full_name(*sites[0]) if sites else name, self._shape(tensor))
        untouched = self._untouched.get(id(tensor))
        if untouched is not None:
            return Layout(untouched[1], self._shape(tensor))
        return self._adopted(tensor, name)

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether it is the untouched model's own, or some step said what it is."""
        if id(tensor) in self._layouts:
            return True
        return bool(self._tree.sites.of(tensor)) if self._untouched is None else id(tensor) in self._untouched

    def changed(self) -> dict[str, Layout]:
        """Full name -> layout of every live tensor for which a step recorded one."""
        return {
            full_name(path, name): self._layouts[id(tensor)][1]
            for path, name, tensor in _live(self._tree)
            if id(tensor) in self._layouts
        }

    # -- writing: for the journal -----------------------------------------------------------------------------

    def begin(self) -> None:
        """The first step is about to be applied: what is there now is the untouched model."""
        self._untouched, self._names = {}, {}
        for path, name, tensor in _live(self._tree):
            own = full_name(path, name)
            self._names[own] = self._untouched.setdefault(id(tensor), (tensor, own))[1]
        self.trained_at_first = {own: tensor.requires_grad for tensor, own in self._untouched.values()}

    def forget(self) -> None:
        """No step is left: whatever is there is the untouched model."""
        self._untouched = None
        self.trained_at_first = {}
        self._layouts.clear()

    def assign(self, tensor: torch.Tensor, layout: Layout | None) -> Layout | None:
        """Record a layout, or, with None, that the tensor has none of its own; gives the one before."""
        before = self._layouts.pop(id(tensor), None)
        if layout is not None:
            self._layouts[id(tensor)] = (tensor, layout)
        return before[1] if before is not None else None

    def drop(self, names: Collection[str]) -> frozenset[str]:
        """Record that untouched tensors are given up; gives what was dropped before."""
        before = self.dropped
        self.dropped = before | frozenset(name for name in names if name)
        return before

    def keep_shapes(self, kept: bool) -> None:
        """Let tensors have the shapes of now, whatever a runtime does to them that partitions them; or no longer."""
        self._shapes = {id(tensor): (tensor, tuple(tensor.shape)) for _, _, tensor in _live(self._tree)} if kept else {}

    def seal(self) -> None:
        """Let go of every tensor that is no longer in the model."""
        if self._untouched is None:
            self.begin()
        assert self._untouched is not None
        live = {id(tensor) for _, _, tensor in _live(self._tree)}
        self._untouched = {key: value for key, value in self._untouched.items() if key in live}
        self._layouts = {key: value for key, value in self._layouts.items() if key in live}
        self._shapes = {key: value for key, value in self._shapes.items() if key in live}

    def _adopted(self, tensor: torch.Tensor, name: str) -> Layout:
        """The layout of a tensor that was put in outside of the schedule: that of the one whose place it took."""
        former = self._tree.former_tensor(name)
        if former is not None and former is not tensor and self.is_known(former):
            layout = self.layout(former, name)
            if former.shape == tensor.shape:
                self._layouts[id(tensor)] = (tensor, layout)
                return layout
        return Layout(self._names.get(name, ""), self._shape(tensor))

    def _shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        kept = self._shapes.get(id(tensor))
        return kept[1] if kept is not None else () if is_lazy(tensor) else tuple(tensor.shape)


def _live(tree: Tree) -> Iterator[tuple[str, str, torch.Tensor]]:
    for path, module in tree.index.modules.items():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    yield path, name, tensor
