"""The base class of runtimes that train a scheduled model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from slapo_core.spec.engine import Engine
    from slapo_core.spec.request import BuildRequest, ScheduledModel
    from slapo_core.spec.violation import Violation

__all__ = ["BuildArguments", "Dialect", "Plan"]


@dataclass(frozen=True)
class BuildArguments:
    """What the user gave to ``build`` beside the schedule and the options, as far as it can be part of a plan.

    Args:
        has_optimizer: whether there is a factory; without one, and without one by the options, the
            engine can only evaluate.
        has_loss: whether there is a loss; else it is that of the output.
        max_grad_norm: the largest L2 norm of all gradients, e.g. ``1.0``; None does not clip.
        accumulate: how many micro-batches a training step takes; 1 is also what it is where the user says nothing.
        device: where the user wants the model; None leaves it where it is.
    """

    has_optimizer: bool = False
    has_loss: bool = False
    max_grad_norm: float | None = None
    accumulate: int = 1
    device: torch.device | None = None


@dataclass(frozen=True)
class Plan:
    """What a dialect is going to do, as data to print and compare before anything is done.

    Args:
        target: the dialect's name, e.g. ``"torch"``.
        steps: one line each, in order, e.g. ``"DistributedDataParallel over mesh_dim 'dp' (2 ranks)"``.
        config: the options after defaults were filled in; the same on every rank, which ``build`` makes sure of.
        notes: names in ``config`` that are no options, but say where those come from, e.g. ``("origins",)``: the
            arguments of ``build``, reasons. Ranks may differ in them.
    """

    target: str
    steps: tuple[str, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"plan for target '{self.target}'", *(f"  {step}" for step in self.steps)])


class Dialect(ABC):
    """A runtime: PyTorch itself, DeepSpeed, Megatron-core, ...

    ``build`` calls :meth:`check`, :meth:`options`, :meth:`plan` and :meth:`build` in this order, on every rank. All but
    the last must change nothing, so that a refusal leaves the schedule as it was.

    Attributes:
        name: what users pass as ``build(sch, target=...)``.
        supports: the mesh dimensions the runtime can run, e.g. ``frozenset({"dp", "tp"})``; ``build`` refuses larger
            ones than 1 that are not among them.
        takes_tensors: whether :meth:`build` takes the tensors one by one, through ``request.materialize()``, because
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

    def options(self, config: Mapping[str, Any], arguments: BuildArguments) -> Mapping[str, Any]:
        """The options that :meth:`plan` is given; pure.

        For a runtime that has options of its own for what ``build`` takes as arguments, e.g. how often it accumulates:
        put here into the options, they are seen in the plan, and one that says something else is refused.

        Args:
            config: the options as the user gave them to ``build``; returned as they are by default.
            arguments: the rest of what the user gave.

        Raises:
            BuildError: an option contradicts an argument.
        """
        return config

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
            one rank for each stage, each rank at least once: ``(0, 0, 1, 1)``, the default: neighbors share a rank;
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
