"""Values that were read and checked, and are put into their places when every rank has its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from slapo_core.spec.state import LiveTensor
    from slapo_core.weights.state import TensorState

__all__ = ["Loading"]


@dataclass
class Loading:
    """Values that were read, to be assigned when every rank has its own.

    Args:
        state: whose values they are.
        assignments: what puts this rank's pieces into their places.
        dropped: as in :class:`TensorState`.
    """

    state: TensorState
    assignments: list[Callable[[], None]] = field(default_factory=list)
    dropped: dict[str, torch.Tensor] = field(default_factory=dict)

    def take(self, live: LiveTensor, piece: torch.Tensor) -> None:
        """Assign this rank's piece of a tensor, in the end."""
        self.assignments.append(self.state.storage.loading(live, piece))

    def assign(self) -> None:
        for assign in self.assignments:
            assign()
        self.state.dropped.update(self.dropped)
