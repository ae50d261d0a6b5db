"""Where a runtime keeps values that the model's own tensors, and a torch optimiser, do not hold.

ZeRO partitions parameters and the optimiser's state over replicas; mixed precision trains masters of a higher one.
State dicts, checkpoints, clipping and the comparison of replicas then ask the runtime, by these two protocols, for what
this rank's place in the schedule would hold without it: the piece that the layout says, whole along ``dp``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from slapo_core.spec.state import LiveTensor

__all__ = ["OptimizerStorage", "TensorStorage"]


class TensorStorage(Protocol):
    """Parameters of a runtime. Reading and writing are collectives over the dimensions that partition them."""

    def partitioned(self, live: LiveTensor) -> tuple[str, ...]:
        """The mesh dimensions along which ranks hold parts of what the schedule has whole, e.g. ``("dp",)``."""
        ...

    def read(self, live: LiveTensor) -> torch.Tensor:
        """This rank's piece, of ``live.layout``'s local shape, in the precision that is trained; not to be changed."""
        ...

    def write(self, live: LiveTensor, value: torch.Tensor) -> None:
        """Take a piece of that shape: wherever the runtime keeps it, in every precision."""
        ...


class OptimizerStorage(Protocol):
    """An optimiser of a runtime, by the model's parameters.

    Attributes:
        kind: the class of the optimiser that computes, e.g. ``"AdamW"``: checkpoints of one load into another of it.
    """

    kind: str

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        """As of ``torch.optim.Optimizer``, with the model's own parameters under ``"params"``; not to be changed."""
        ...

    def partitioned(self, parameter: torch.Tensor) -> tuple[str, ...]:
        """The mesh dimensions along which ranks hold parts of its state, e.g. ``("dp",)``."""
        ...

    def state(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        """Its state by key: numbers and scalar tensors as they are; for a tensor of the parameter's shape one without
        values, on the meta device. The same keys on every rank that shares the parameter; empty before the first step.
        """
        ...

    def read(self, parameter: torch.Tensor, key: str) -> torch.Tensor:
        """One tensor of its state, of the parameter's local shape: a collective over what partitions it."""
        ...

    def load(self, groups: Sequence[Mapping[str, Any]], states: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """Take settings, in the order of :attr:`param_groups`, and the state of every parameter that has one."""
        ...
