"""A checkpoint in pieces: what each rank writes and reads of it, for a runtime that has files of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["Piece", "PieceSource", "Pieces"]


@dataclass(frozen=True)
class Piece:
    """A rectangle of a whole tensor, in the reference model's layout: no padding, no order of packed matrices.

    Args:
        kind: ``"weight"``; ``"added"`` for what a step added; ``"optimizer"`` for its state.
        name: of the whole tensor: a name of the reference model; for the optimizer's state with its key, e.g.
            ``"fc.weight::exp_avg"``.
        shape: of the whole tensor, in elements.
        offset: of the rectangle's first element, along each axis.
        value: its elements, contiguous, on the CPU, in the precision that is trained.
    """

    kind: Literal["weight", "added", "optimizer"]
    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    value: torch.Tensor = field(repr=False)


@dataclass(frozen=True)
class Pieces:
    """What one rank writes of a checkpoint.

    Args:
        description: everything that is no tensor, as JSON; the same on every rank.
        own: every element of every tensor is in a piece of exactly one rank.
    """

    description: Mapping[str, Any]
    own: Sequence[Piece]


class PieceSource(Protocol):
    """Where pieces are read from."""

    @property
    def label(self) -> str:
        """What to call it in a message, e.g. ``"the sharded checkpoint 'runs/1'"``."""
        ...

    def like(self, kind: str, name: str) -> torch.Tensor:
        """A tensor of its shape and type on the meta device: no collective.

        Raises:
            KeyError: there is none.
        """
        ...

    def read(self, wanted: Sequence[Piece]) -> None:
        """Fill the values of these pieces, of any shape: a collective, also of ranks that want none."""
        ...
