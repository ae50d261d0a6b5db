"""The base class of runtimes that train a scheduled model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from slapo_core.spec.engine import Engine
    from slapo_core.spec.request import BuildRequest, ScheduledModel
    from slapo_core.spec.violation import Violation

__all__ = ["Dialect", "Plan"]


@dataclass(frozen=True)
class Plan:
    """What a dialect is going to do, as data to print and compare before anything is done.

    Args:
        target: the dialect's name, e.g. ``"torch"``.
        steps: one line each, in order, e.g. ``"DistributedDataParallel over mesh_dim 'dp' (2 ranks)"``.
        config: the options after defaults were filled in; the same on every rank, which ``build`` makes sure of.
    """

    target: str
    steps: tuple[str, ...]
    config: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join([f"plan for target '{self.target}'", *(f"  {step}" for step in self.steps)])


class Dialect(ABC):
    """A runtime: PyTorch itself, DeepSpeed, Megatron-core, ...

    ``build`` calls :meth:`check`, :meth:`plan` and :meth:`build` in this order, on every rank. The first two must
    change nothing, so that a refusal leaves the schedule as it was.

    Attributes:
        name: what users pass as ``build(sch, target=...)``.
        supports: the mesh dimensions the runtime can run, e.g. ``frozenset({"dp", "tp"})``; ``build`` refuses larger
            ones than 1 that are not among them.
        takes_tensors: whether :meth:`build` takes the tensors one by one, through ``request.materialise()``, because
            it partitions them as they come. Otherwise they all have their values before it is called.
        accumulates: whether a training step of the engine takes ``request.micro_batches(batch)`` one after the other;
            ``build(..., accumulate=2)`` is refused otherwise.
    """

    name: ClassVar[str]
    supports: ClassVar[frozenset[str]]
    takes_tensors: ClassVar[bool] = False
    accumulates: ClassVar[bool] = False

    def check(self, schedule: ScheduledModel) -> Iterable[Violation]:
        """Every reason why this schedule cannot be handed to the runtime."""
        return ()

    @abstractmethod
    def plan(self, schedule: ScheduledModel, config: Mapping[str, Any]) -> Plan:
        """What :meth:`build` will do, with the options after defaults were filled in; pure.

        Given the options of its own plan, it gives that plan again.

        Raises:
            BuildError: an option that the runtime does not have, or a bad value.
        """

    def stage_ranks(self, plan: Plan, stages: int, pp: int) -> tuple[int, ...]:
        """Which rank along ``pp`` runs which stage; pure. Asked by ``build`` where the mesh has several of these ranks.

        Args:
            plan: what :meth:`plan` gave.
            stages: how many the model is cut into, a multiple of ``pp``.
            pp: the size of that mesh dimension.

        Returns:
            one rank for each stage, each rank at least once: ``(0, 0, 1, 1)``, the default: neighbours share a rank;
            ``(0, 1, 0, 1)`` for a loop, ``(0, 1, 1, 0)`` for a V.
        """
        return tuple(stage * pp // stages for stage in range(stages))

    @abstractmethod
    def build(self, plan: Plan, request: BuildRequest) -> Engine:
        """Hand the scheduled model to the runtime.

        Args:
            plan: what :meth:`plan` gave; all ranks have the same.
            request: the model, its state, and what the user gave to ``build``.
        """
