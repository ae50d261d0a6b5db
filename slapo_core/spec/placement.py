"""Which ranks along ``pp`` hold which tensors: plain data, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slapo_core.spec.state import LiveTensor

__all__ = ["Placement"]


@dataclass(frozen=True)
class Placement:
    """Where the tensors of a model that is cut into stages live.

    A rank that does not hold a tensor has a stand-in of the same shape in its place, on the meta device, so that the
    model keeps its structure and its names. A tensor of which ranks along ``tp`` hold pieces does so in each place
    along ``pp`` that is named here.

    Args:
        untouched: first name of each tensor of the reference model -> the ranks along ``pp`` that hold what stands for
            it, ascending; several for a parameter that several stages use. E.g. ``{"wte.weight": (0, 1)}``.
        added: the same of what steps made that no single reference tensor explains, by its name in the scheduled model.
    """

    untouched: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    added: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def holders(self, live: LiveTensor) -> tuple[int, ...]:
        """The ranks along ``pp`` that hold a tensor of the scheduled model; none where it came after the build."""
        if live.stands_for:
            return self.untouched.get(live.stands_for[0], ())
        return self.added.get(live.name, ())
