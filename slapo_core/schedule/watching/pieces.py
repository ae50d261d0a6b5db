"""Which tensors of a live model are pieces: what a plain tool, which takes them for whole, must be told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.utils.weak import WeakIdKeyDictionary

from slapo_core.tree.index import full_name
from slapo_core.tree.journal import Entry, ReplaceModule, SetLayout, SetTensor

if TYPE_CHECKING:
    import torch
    from torch import nn

    from slapo_core.spec.layout import Layout
    from slapo_core.spec.mesh import Mesh

__all__ = ["Piece", "Pieces", "described"]


@dataclass(frozen=True)
class Piece:
    """What one tensor is a piece of.

    Args:
        local: its own shape.
        whole: the shape of the untouched tensor.
        dims: the mesh dimensions, of several ranks, along which ranks hold different ones.
        is_summand: whether they add up to the untouched tensor, instead of lying side by side.
    """

    local: tuple[int, ...]
    whole: tuple[int, ...]
    dims: tuple[str, ...]
    is_summand: bool


class Pieces:
    """The pieces that the steps of one schedule made, which it does not keep alive.

    Args:
        mesh: of the schedule.
    """

    def __init__(self, mesh: Mesh | None) -> None:
        self._mesh = mesh
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.names: dict[str, Piece] = {}
        """Those made or found last, by full name."""
        self.dims: frozenset[str] = frozenset()
        """The mesh dimensions, of several ranks, along which any tensor was split."""

    def note(self, entry: Entry, *, undone: bool = False) -> bool:
        """Note an edit that was made, or undone.

        Returns:
            whether it split anything.
        """
        found = False
        for name, tensor, layout in _layouts(entry):
            dims = tuple(dict.fromkeys(d for d, p in layout.placements if self._runs(d) and not p.is_replicate()))
            if not dims:
                continue
            found = True
            self.dims |= frozenset(dims)
            piece = Piece(tuple(tensor.shape), tuple(layout.shape), dims, bool(layout.partials()))
            self._known[tensor] = piece
            if undone:
                self.names.pop(name, None)
            elif name:
                self.names[name] = piece
        return found

    def find(self, model: nn.Module) -> dict[str, Piece]:
        """The pieces that ``model`` holds now, by full name.

        A tensor that came in the place of one, in its shape (``load_state_dict(assign=True)``), counts as one.
        """
        found = {}
        for name, tensor in _named_tensors(model):
            piece = self._known.get(tensor)
            if piece is None:
                former = self.names.get(name)
                piece = former if former is not None and former.local == tuple(tensor.shape) else None
            if piece is not None:
                found[name] = piece
        self.names.update(found)
        return found

    def _runs(self, mesh_dim: str) -> bool:
        return self._mesh is not None and self._mesh.size(mesh_dim) > 1


def described(pieces: dict[str, Piece]) -> str:
    """``"12 tensors, such as 'fc1.weight', here (8, 6) of (16, 6)"``."""
    name, piece = next(iter(pieces.items()))
    is_sum = "a summand of shape" if piece.is_summand else "here"
    example = f"'{name}', {is_sum} {piece.local} of {piece.whole}"
    return example if len(pieces) == 1 else f"{len(pieces)} tensors, such as {example}"


def _layouts(entry: Entry) -> Iterator[tuple[str, torch.Tensor, Layout]]:
    """Each tensor of which an edit says what it stands for, with its full name where that is at hand."""
    if isinstance(entry, SetTensor):
        if entry.new is not None and entry.layout is not None:
            yield full_name(*entry.sites[0]), entry.new, entry.layout
    elif isinstance(entry, ReplaceModule):
        yield from (("", tensor, layout) for tensor, layout in entry.assigned)
    elif isinstance(entry, SetLayout):
        yield "", entry.tensor, entry.layout


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
