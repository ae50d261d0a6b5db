"""The protocol of runtimes: dialects plan and build, engines train."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import nn

    from slapo_core import BuildContext
    from slapo_core.effects import Effect
    from slapo_core.primitive import Violation
    from slapo_core.schedule.schedule import Schedule

__all__ = [
    "BuildArguments",
    "Dialect",
    "Engine",
    "Plan",
    "StepResult",
    "arguments_as_options",
]


@dataclass(frozen=True)
class BuildArguments:
    """The arguments of ``build`` that can be part of a plan.

    Args:
        has_optimizer: whether there is a factory; without one, and without one by the options, the
            engine can only evaluate.
        has_loss: whether there is a loss; otherwise the output has it.
        max_grad_norm: the largest L2 norm of all gradients, e.g. ``1.0``; None does not clip.
        accumulate: how many micro-batches a training step takes; default 1.
        device: where the user wants the model; None leaves it where it is.
        has_lr_scheduler: whether there is a factory of a scheduler of the learning rate.
    """

    has_optimizer: bool = False
    has_loss: bool = False
    max_grad_norm: float | None = None
    accumulate: int = 1
    device: torch.device | None = None
    has_lr_scheduler: bool = False


@dataclass(frozen=True)
class Plan:
    """The plan of a build, as data to print and compare beforehand.

    Args:
        target: the dialect's name, e.g. ``"torch"``.
        steps: one line each, in order, e.g. ``"DistributedDataParallel over mesh_dim 'dp' (2 ranks)"``.
        config: the options after defaults were filled in; the same on every rank, which ``build`` makes sure of.
        notes: names in ``config`` that are not options but explain them, e.g. ``("origins",)``: the
            arguments of ``build``, reasons. Ranks may differ in them.
        effects: what a training step shows of the runtime's own work on this rank, e.g. the exchange of gradients;
            ``build(..., receipts=True)`` and ``observe`` look for it. They are not printed, and ranks may differ in
            them.
    """

    target: str
    steps: tuple[str, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    effects: tuple[Effect, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"plan for target '{self.target}'", *(f"  {step}" for step in self.steps)])


class Dialect(ABC):
    """A runtime: PyTorch itself, DeepSpeed, Megatron-core, ...

    ``build`` calls :meth:`check`, :meth:`options`, :meth:`plan` and :meth:`build` in this order, on every rank. All but
    the last must change nothing, so that a refusal leaves the schedule as it was.

    Attributes:
        name: what users pass as ``build(sch, target=...)``.
        supports: the mesh dimensions the runtime can run, e.g. ``frozenset({"dp", "tp"})``; ``build`` refuses any
            other one of a size above 1.
        takes_tensors: whether :meth:`build` takes the tensors one by one, through ``context.materialize()``, and
            partitions each at once. Otherwise all have their values before it is called.
        accumulates: whether a training step of the engine takes ``context.micro_batches(batch)`` one after the other;
            ``build(..., accumulate=2)`` is refused otherwise.
        instead: name of a primitive of other targets -> the option of this one that does the same, for the refusal.
    """

    name: ClassVar[str]
    supports: ClassVar[frozenset[str]]
    takes_tensors: ClassVar[bool] = False
    accumulates: ClassVar[bool] = False
    instead: ClassVar[Mapping[str, str]] = {}

    def check(self, schedule: Schedule) -> Iterable[Violation]:
        """Give every reason why the runtime cannot take this schedule."""
        return ()

    def options(self, config: Mapping[str, Any], arguments: BuildArguments) -> Mapping[str, Any]:
        """Return the options for :meth:`plan`; pure.

        A runtime with options of its own for arguments of ``build``, e.g. for ``accumulate``, adds them here, so that
        the plan shows them, and refuses an option that contradicts its argument.

        Args:
            config: the options as the user gave them to ``build``; returned as they are by default.
            arguments: the user's other arguments.

        Raises:
            BuildError: an option contradicts an argument.
        """
        return config

    @abstractmethod
    def plan(self, schedule: Schedule, config: Mapping[str, Any]) -> Plan:
        """Return the plan of :meth:`build`, with all options filled in; pure.

        Given the options of its own plan, it gives that plan again.

        Raises:
            BuildError: an option that the runtime does not have, or a bad value.
        """

    def stage_ranks(self, plan: Plan, stages: int, pp: int) -> tuple[int, ...]:
        """Return the pipeline rank of each stage, of several pipeline ranks; pure.

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
    def build(self, plan: Plan, context: BuildContext) -> Engine:
        """Hand the scheduled model to the runtime.

        Args:
            plan: what :meth:`plan` gave; all ranks have the same.
            context: the model, its state, and the user's arguments of ``build``.
        """

    def simulate(self, plan: Plan, context: BuildContext) -> Callable[[Any], Any] | None:
        """Return a ``train_step`` for tensors without memory, for estimates.

        It is called in a process of its own that simulates one rank: the tensors are fake, on the CPU; collectives
        leave them as they are; a number that is read from one is 0. A runtime that trains under these conditions
        returns ``self.build(plan, context).train_step``.

        Args:
            plan: what :meth:`plan` gave.
            context: as for :meth:`build`.

        Returns:
            a function of a batch; None, the default, where the needs of a step are not known.
        """
        return None


def arguments_as_options(arguments: BuildArguments) -> dict[str, Any]:
    """Return the user's arguments of ``build`` as plain values, which ranks can compare."""
    return {
        "accumulate": arguments.accumulate,
        "device": None if arguments.device is None else arguments.device.type,
        "has_loss": arguments.has_loss,
        "has_optimizer": arguments.has_optimizer,
        "max_grad_norm": arguments.max_grad_norm,
        **({"has_lr_scheduler": True} if arguments.has_lr_scheduler else {}),
    }


@dataclass(frozen=True)
class StepResult:
    """The outcome of one step on this rank.

    Args:
        loss: scalar tensor, detached; of this rank's own samples, with a pipeline of its replica's samples.
        output: the model's output; None where the runtime does not give it out.
        grad_norm: the L2 norm of all gradients over all ranks before clipping; None unless ``max_grad_norm`` was given.
        learning_rate: of the optimizer's first group in this step, as it holds it; None in an evaluation.
        tokens: scalar tensor; the sum of ``loss_weight`` over all replicas; None without ``loss_weight``.
        seconds: of the host, from the cut of the batch on; the device may still compute. None in an evaluation.

    Tensors stay on the device: the host waits for it once one is read, e.g. by ``float(result.loss)``.
    """

    loss: torch.Tensor
    output: Any = None
    grad_norm: torch.Tensor | None = None
    learning_rate: float | torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    seconds: float | None = None

    @property
    def peak_memory(self) -> int:
        """The most bytes that were allocated at a time on the loss's device so far; on the CPU, resident ones."""
        if self.loss.device.type == "cpu":
            import resource
            import sys

            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return peak if sys.platform == "darwin" else peak << 10  # in bytes, or KiB
        import torch

        return torch.get_device_module(self.loss.device).max_memory_allocated(self.loss.device)  # type: ignore[no-any-return]


@runtime_checkable
class Engine(Protocol):
    """A scheduled model, ready to train."""

    @property
    def module(self) -> nn.Module:
        """The scheduled model, with the reference model's paths; with a pipeline, this rank's stages of it."""
        ...

    def train_step(self, batch: Any) -> StepResult:
        """Forward, backward, and one optimizer step, in training mode.

        If every module is in evaluation mode, the model is put into training mode, with a warning; otherwise every
        module keeps its mode. With ``build(..., accumulate=n)`` the batch is cut into n
        micro-batches along the first axis of every tensor: one after the other goes forward and backward, the
        gradients and the loss are the means over them, and there is one optimizer step and no ``output``.

        The first step compares the batch over the ranks of a replica, and synchronizes RNG states over ``tp``.

        With a pipeline every rank takes the full batch of its replica, which is cut into the micro-batches of the
        schedule: the loss and the gradients are the means over them.

        Args:
            batch: a mapping (keyword arguments), a tuple or list (positional arguments), or one argument.

        Raises:
            BuildError: the engine has no optimizer, or is closed; the loss is missing; or the batch cannot be cut into
                micro-batches.
            RankMismatchError: the ranks of one replica were given different batches.
            RankFailedError: with a pipeline, on every rank: a rank failed in the middle of the step, and which one.
        """
        ...

    def eval_step(self, batch: Any) -> StepResult:
        """Forward only: evaluation mode, no gradients; the mode is restored.

        Args:
            batch: as for ``train_step``.

        Raises:
            BuildError: the engine is closed, or the loss is missing.
        """
        ...

    def state_dict(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """Return all weights in the reference layout: a collective where anything is sharded.

        Where it is a collective, the ranks compare their replicas; otherwise it is this rank's own.

        Args:
            rank0_only: other ranks take part but return an empty dictionary.

        Raises:
            ReplicaError: replicas of a tensor differ between ranks; the error's ``state_dict`` has this rank's.
        """
        ...

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load weights in the reference layout; every rank keeps its own shards.

        Args:
            state: full tensors, the same on every rank, as ``state_dict`` gives them.

        Raises:
            WeightsError: names or shapes do not fit; nothing was changed.
        """
        ...

    def check_replicas(self, *, repair: bool = False) -> None:
        """Compare the replicas of tensors and optimizer state: a collective over the mesh.

        Args:
            repair: give every rank the values of the first rank with a replica, and warn about the differences,
                instead of an error.

        Raises:
            ReplicaError: on every rank; it names the tensors, the ranks and their values.
        """
        ...

    def save(self, directory: str | os.PathLike[str]) -> Any:
        """Write a checkpoint of weights and optimizer state, in the reference layout: a collective.

        Replicas are compared first, as by :meth:`check_replicas`. The state of torch's generators in each replica is
        saved too.

        Args:
            directory: of the checkpoints of all steps; created if missing.

        Raises:
            ArgumentError: the directory is ``""``.
            ReplicaError: replicas differ between ranks; the checkpoint is complete, with the first rank's values.
            BuildError: the optimizer holds a value that a checkpoint cannot store, or writing failed.
        """
        ...

    def load(self, directory: str | os.PathLike[str]) -> None:
        """Load a checkpoint of this or any other schedule of the model.

        torch's generators go on from the state that this replica (place along ``dp``) saved, if there was one.

        Args:
            directory: as given to ``save``, for its newest complete checkpoint; or the directory of one checkpoint.

        Raises:
            WeightsError: it holds no complete checkpoint, or one of another model; nothing was changed.
            BuildError: it has no optimizer state, or one that does not fit; nothing was changed.
        """
        ...

    def close(self) -> None:
        """Release the engine's resources; process groups made by the caller stay.

        It may be called again; a step afterwards is a BuildError that says so. The state can still be read.
        """
        ...
