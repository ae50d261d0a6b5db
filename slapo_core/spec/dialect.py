"""The base class of runtimes that train a scheduled model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from slapo_core.spec.engine import Engine
    from slapo_core.spec.violation import Violation

__all__ = ["Dialect", "Plan"]


@dataclass(frozen=True)
class Plan:
    """What a dialect is going to do, as data to print and compare before anything is done.

    Args:
        target: the dialect's name, e.g. ``"torch"``.
        steps: one line each, in order, e.g. ``"DistributedDataParallel over mesh_dim 'dp' (2 ranks)"``.
        config: the options after defaults were filled in.
    """

    target: str
    steps: tuple[str, ...]
    config: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join([f"plan for target '{self.target}'", *(f"  {step}" for step in self.steps)])


class Dialect(ABC):
    """A runtime: PyTorch itself, DeepSpeed, Megatron-core, ...

    Attributes:
        name: what users pass as ``build(sch, target=...)``.
        supports: the mesh dimensions the runtime can run, e.g. ``frozenset({"dp", "tp"})``.
    """

    name: ClassVar[str]
    supports: ClassVar[frozenset[str]]

    @abstractmethod
    def check(self, schedule: Any) -> Iterator[Violation]:
        """Every reason why this schedule cannot be handed to the runtime."""

    @abstractmethod
    def plan(self, schedule: Any, config: Mapping[str, Any]) -> Plan:
        """What ``build`` will do; pure.

        Raises:
            BuildError: an option that the runtime does not have.
        """

    @abstractmethod
    def build(self, plan: Plan, schedule: Any, **options: Any) -> Engine:
        """Hand the scheduled model, already materialised, to the runtime."""
