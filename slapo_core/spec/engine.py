"""What ``build`` returns, whatever the target."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Engine", "StepResult"]


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

        The first step compares the batch over the ranks of a replica, and makes its tensor-parallel ones draw alike.

        With a pipeline every rank is given the whole batch of its replica, which is cut into the micro-batches of the
        schedule: the loss and the gradients are the means over them.

        Args:
            batch: a mapping (keyword arguments), a tuple or list (positional arguments), or one argument.

        Raises:
            BuildError: the engine was built without an optimizer, or is closed; there is no loss; or the batch cannot
                be cut into micro-batches.
            RankMismatchError: the ranks of one replica were given different batches.
            RankFailedError: with a pipeline, on every rank: a rank failed in the middle of the step, and which one.
        """
        ...

    def eval_step(self, batch: Any) -> StepResult:
        """Forward only: evaluation mode, no gradients; the mode is restored.

        Args:
            batch: as for ``train_step``.

        Raises:
            BuildError: the engine is closed, or there is no loss.
        """
        ...

    def state_dict(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """All weights with the reference model's names, shapes and layout: a collective where anything is sharded.

        Where it is a collective, the ranks compare the copies that they hold; else it is this rank's own.

        Args:
            rank0_only: other ranks take part but return an empty dictionary.

        Raises:
            ReplicaError: ranks hold different copies of a tensor; its ``state_dict`` holds this rank's.
        """
        ...

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load weights that have the reference model's names and shapes; every rank keeps its own pieces.

        Args:
            state: whole tensors, the same on every rank, as ``state_dict`` gives them.

        Raises:
            WeightsError: names or shapes do not fit; nothing was changed.
        """
        ...

    def check_replicas(self, *, repair: bool = False) -> None:
        """Compare what several ranks hold copies of, tensors and optimizer state: a collective over the mesh.

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
            ReplicaError: ranks hold different copies; the checkpoint is whole, with the values of the first rank.
            BuildError: the optimizer holds something that has no place in a checkpoint, or writing failed.
        """
        ...

    def load(self, directory: str | os.PathLike[str]) -> None:
        """Read what ``save`` wrote, under this or any other schedule of the same model.

        torch's generators go on from the state that this replica (place along ``dp``) saved, if there was one.

        Args:
            directory: that of ``save``.

        Raises:
            WeightsError: it holds no whole checkpoint, or one of another model; nothing was changed.
            BuildError: it has no optimizer state, or one that does not fit; nothing was changed.
        """
        ...

    def close(self) -> None:
        """Release what the engine holds; process groups made by the caller stay.

        It may be called again; a step afterwards is a BuildError that says so. The state can still be read.
        """
        ...
