"""The protocol of engines, and a base class for those of dialects."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from slapo_core.errors import BuildError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from slapo_core.spec.state import ModelState, OptimizerStorage

__all__ = ["Engine", "StatefulEngine", "StepResult"]


@dataclass(frozen=True)
class StepResult:
    """The outcome of one step on this rank.

    Args:
        loss: scalar tensor, detached; of this rank's own samples, with a pipeline those of its replica.
        output: the model's output; None where the runtime does not give it out.
        grad_norm: the L2 norm of all gradients over all ranks before clipping; None unless ``max_grad_norm`` was given.
    """

    loss: torch.Tensor
    output: Any = None
    grad_norm: torch.Tensor | None = None


@runtime_checkable
class Engine(Protocol):
    """A scheduled model, ready to train."""

    @property
    def module(self) -> nn.Module:
        """The scheduled model; its paths are those of the reference model. With a pipeline, this rank's part of it."""
        ...

    def train_step(self, batch: Any) -> StepResult:
        """Forward, backward, and one optimizer step, in training mode.

        A model that is in evaluation mode as a whole is put into training mode, with a warning; where some module is in
        training mode, every module keeps its mode. With ``build(..., accumulate=n)`` the batch is cut into n
        micro-batches along the first axis of every tensor: one after the other goes forward and backward, the
        gradients and the loss are the means over them, and there is one optimizer step and no ``output``.

        The first step compares the batch over the ranks of a replica, and synchronizes RNG states over ``tp``.

        With a pipeline every rank is given the whole batch of its replica, which is cut into the micro-batches of the
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
        """All weights with the reference model's names, shapes and layout: a collective where anything is sharded.

        Where it is a collective, the ranks compare the copies that they hold; else it is this rank's own.

        Args:
            rank0_only: other ranks take part but return an empty dictionary.

        Raises:
            ReplicaError: replicas differ between ranks of a tensor; its ``state_dict`` holds this rank's.
        """
        ...

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load weights that have the reference model's names and shapes; every rank keeps its own shards.

        Args:
            state: whole tensors, the same on every rank, as ``state_dict`` gives them.

        Raises:
            WeightsError: names or shapes do not fit; nothing was changed.
        """
        ...

    def check_replicas(self, *, repair: bool = False) -> None:
        """Compare the replicas of tensors and optimizer state: a collective over the mesh.

        Args:
            repair: give every rank the values of the first one that holds a copy, with a warning that says what
                differed, instead of an error.

        Raises:
            ReplicaError: on every rank; it names the tensors, the ranks and what each of them holds.
        """
        ...

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write weights and optimizer state, in the reference layout, as safetensors: a collective.

        Replicas are compared first, as by :meth:`check_replicas`. A model that has a ``config`` as transformers' have
        gets its ``config.json``, so that ``from_pretrained`` reads the directory. The state of torch's generators in
        each replica is saved too.

        Args:
            directory: made if it is not there; a checkpoint in it is replaced as a whole.

        Raises:
            ArgumentError: the directory is ``""``.
            ReplicaError: replicas differ between ranks; the checkpoint is whole, with the values of the first rank.
            BuildError: the optimizer holds something that has no place in a checkpoint, or writing failed.
        """
        ...

    def load(self, directory: str | os.PathLike[str]) -> None:
        """Read what ``save`` wrote, under this or any other schedule of the same model.

        torch's generators go on from the state that this replica (place along ``dp``) saved, if there was one.

        Args:
            directory: that of ``save``.

        Raises:
            WeightsError: it holds no complete checkpoint, or one of another model; nothing was changed.
            BuildError: it has no optimizer state, or one that does not fit; nothing was changed.
        """
        ...

    def close(self) -> None:
        """Release what the engine holds; process groups made by the caller stay.

        It may be called again; a step afterwards is a BuildError that says so. The state can still be read.
        """
        ...


class StatefulEngine:
    """State dicts and checkpoints by the request's state, and refusals of steps.

    An engine that derives from it sets the two attributes, and has all members of
    :class:`slapo_core.spec.engine.Engine` but ``module``, the steps and ``close``. One whose runtime keeps values
    elsewhere calls ``request.state.keep_in``, and overrides the methods from :meth:`_kept_optimizer` on.

    Attributes:
        optimizer: None where the engine only evaluates, or is closed.
        _state: ``request.state``.
    """

    optimizer: Any
    _state: ModelState
    _reason: str | None = None  # why it is closed

    def state_dict(self, *, rank0_only: bool = False, include_added: bool = False) -> dict[str, torch.Tensor]:
        """The reference model's state dict; ``include_added`` gives what a step added too, under its own name."""
        return self._state.state_dict(rank0_only=rank0_only, include_added=include_added)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self._state.load_state_dict(state)

    def check_replicas(self, *, repair: bool = False) -> None:
        self._state.check_replicas(optimizer=self._kept_optimizer(), repair=repair)

    def save(self, directory: str | os.PathLike[str]) -> None:
        self._state.save(directory, optimizer=self._kept_optimizer(), runtime=self._beside())

    def load(self, directory: str | os.PathLike[str]) -> None:
        self._resume(self._state.load(directory, optimizer=self._kept_optimizer(), uses=self._uses()))

    # -- for a runtime that keeps values elsewhere ------------------------------------------------------------

    def _kept_optimizer(self) -> torch.optim.Optimizer | OptimizerStorage | None:
        """The optimizer, as the state is given it."""
        optimizer: torch.optim.Optimizer | OptimizerStorage | None = self.optimizer
        return optimizer

    def _beside(self) -> Mapping[str, Any]:
        """Return the runtime's further state for checkpoints, as JSON, by name."""
        return {}

    def _uses(self) -> Collection[str]:
        """Return the names of :meth:`_beside` that this engine loads; a warning names the others."""
        return ()

    def _resume(self, runtime: Mapping[str, Any]) -> None:
        """Take what :meth:`_beside` of the engine that saved it gave, after weights and optimizer; ``{}``: nothing."""

    # -- the end ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _closing(self, at: Callable[[], str]) -> Iterator[None]:
        """Close the engine if a step fails midway: the ranks have diverged.

        Other ranks may wait for this one then, until the launcher of the job ends them, or the timeout of the group.

        Args:
            at: tells what this rank does just now, e.g. ``"stage 1 in the forward of micro-batch 0"``.
        """
        try:
            yield
        except BaseException as error:
            error.add_note(f"a step of the pipeline failed here: {at()}")
            self._reason = f"a step failed: {type(error).__name__}: {error}"
            self.close()  # type: ignore[attr-defined]
            raise

    # -- refusals -----------------------------------------------------------------------------------------------

    @staticmethod
    def _refuse_without_gradients() -> None:
        """Refuse a training step where torch computes no gradients."""
        import torch

        if not torch.is_grad_enabled():
            raise BuildError(
                "train_step() was called without gradients: inside of torch.no_grad() or torch.inference_mode()",
                hint="call it outside of that block, or engine.eval_step(batch) inside",
            )

    @staticmethod
    def _without_optimizer() -> BuildError:
        return BuildError(
            "this engine cannot train: it was built without an optimizer",
            hint="build(sch, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4))",
        )

    @staticmethod
    def _closed(reason: str = "") -> BuildError:
        return BuildError(
            f"the engine is closed{reason and ', because '}{reason}",
            hint="schedule and build a fresh model, with weights=engine.state_dict()",
        )
