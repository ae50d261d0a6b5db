"""What the tensors of a scheduled model stand for, and the way to and from the reference model's layout."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from slapo_core.spec.layout import Layout
    from slapo_core.spec.pieces import Pieces, PieceSource
    from slapo_core.spec.storage import OptimizerStorage, TensorStorage

__all__ = ["LiveTensor", "ModelState"]


@dataclass(frozen=True)
class LiveTensor:
    """One parameter or buffer of the scheduled model.

    Args:
        path: of the module that holds it, e.g. ``"encoder.layer.0.output.dense"``; the first place of a tied one.
        own_name: its name there, e.g. ``"weight"``.
        tensor: the local tensor. Where the runtime keeps values elsewhere (:mod:`slapo_core.spec.storage`) it may be
            without its values and its shape; ``layout.local_shape(mesh)`` always says that.
        layout: how it lies in the reference tensor; ``layout.origin`` is ``""`` where no single one explains it.
        is_parameter: False for a buffer.
        is_persistent: whether it belongs into a state dict.
        stands_for: the reference tensors that it carries, by first name: one for a layout, several for what a plugin
            merged, none for what a step added.
        is_here: False where only other ranks along ``pp`` hold it; ``tensor`` is a stand-in on the meta device then.
    """

    path: str
    own_name: str
    tensor: torch.Tensor = field(repr=False)
    layout: Layout
    is_parameter: bool
    is_persistent: bool
    stands_for: tuple[str, ...] = ()
    is_here: bool = True

    @property
    def name(self) -> str:
        """The full name in the scheduled model, e.g. ``"encoder.layer.0.output.dense.weight"``."""
        return f"{self.path}.{self.own_name}" if self.path else self.own_name

    @property
    def reference_name(self) -> str:
        """The reference model's name where there is one; else the tensor's own."""
        return self.layout.origin or self.name


class ModelState(Protocol):
    """The state of a scheduled model, by the reference model's names, shapes and layout.

    All methods are collectives where the mesh has several ranks: every rank calls them, in the same order.
    """

    def tensors(self) -> tuple[LiveTensor, ...]:
        """Every parameter and buffer of the scheduled model as it is now, each once, in registration order."""
        ...

    def keep_in(self, storage: TensorStorage) -> None:
        """Read and write tensors where a runtime keeps them, from now on; for a dialect, while it is built.

        What it partitions over replicas is no copy along ``dp`` any more, and is compared along the other dimensions.
        """
        ...

    def check_replicas(
        self, *, optimizer: torch.optim.Optimizer | OptimizerStorage | None = None, repair: bool = False
    ) -> None:
        """Compare what several ranks hold copies of, bit for bit: a collective over the mesh.

        Parameters, and buffers but for the running statistics of replicas; the state and the settings of an optimizer;
        and, where training steps draw random numbers, torch's random state over ``tp``. Of a runtime that trains other
        tensors than the forward computes with, both.

        Args:
            optimizer: over the model's parameters.
            repair: give every rank the values of the first one that holds a copy, with a warning that says what
                differed, instead of an error.

        Raises:
            RankMismatchError: on every rank; it names the tensors, the ranks and what each of them holds. Also where
                the forward computes with something else than what is trained.
        """
        ...

    def state_dict(self, *, rank0_only: bool = False, include_added: bool = False) -> dict[str, torch.Tensor]:
        """The reference model's state dict: copies on the CPU, with its keys in its order and its types.

        Args:
            rank0_only: other ranks take part but return an empty dictionary.
            include_added: also give what a step added, under its own name; without, a warning names it once.

        Raises:
            RankMismatchError: ranks hold different copies of a tensor. It is compared where putting tensors together
                takes all ranks anyway, and with ``rank0_only``.
        """
        ...

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """The reverse: every rank copies its own pieces into the live tensors.

        Raises:
            WeightsError: missing or unexpected names, or other shapes; nothing was changed.
        """
        ...

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        optimizer: torch.optim.Optimizer | OptimizerStorage | None = None,
        runtime: Mapping[str, Any] | None = None,
    ) -> None:
        """Write weights and the optimizer's state, readable under any schedule of the same model, by any target.

        Args:
            directory: made if it is not there; a checkpoint in it is replaced as a whole.
            optimizer: over the model's parameters.
            runtime: what else the runtime needs to go on, as JSON, by name: ``{"lr_scheduler": {...}}``. Under
                ``"counters"`` comes what nothing depends on, such as how many steps there were.

        Raises:
            ReplicaError: as :meth:`check_replicas` says; what was written is whole, with the first rank's values.
            BuildError: the optimizer, or ``runtime``, holds something that has no place in a checkpoint, or writing
                failed.
        """
        ...

    def load(
        self,
        directory: str | os.PathLike[str],
        *,
        optimizer: torch.optim.Optimizer | OptimizerStorage | None = None,
        uses: Collection[str] = (),
    ) -> dict[str, Any]:
        """Read what :meth:`save` wrote.

        Args:
            directory: that of :meth:`save`.
            optimizer: over the model's parameters.
            uses: the names in ``runtime`` that the caller makes use of; a warning names the others of the checkpoint,
                but for ``"counters"``.

        Returns:
            the ``runtime`` of the checkpoint, ``{}`` without one.

        Raises:
            WeightsError: no whole checkpoint, or of another model; nothing was changed.
            BuildError: the optimizer's state does not fit this optimizer; nothing was changed.
        """
        ...

    def pieces(
        self,
        *,
        optimizer: torch.optim.Optimizer | OptimizerStorage | None = None,
        runtime: Mapping[str, Any] | None = None,
    ) -> Pieces:
        """What this rank writes of a checkpoint, for a runtime with files of its own; any schedule can read it.

        Args:
            optimizer: over the model's parameters.
            runtime: as for :meth:`save`.

        Raises:
            RankMismatchError: as :meth:`check_replicas` says.
            BuildError: the optimizer, or ``runtime``, holds something that has no place in a checkpoint.
        """
        ...

    def load_pieces(
        self,
        description: Mapping[str, Any],
        source: PieceSource,
        *,
        optimizer: torch.optim.Optimizer | OptimizerStorage | None = None,
        uses: Collection[str] = (),
    ) -> dict[str, Any]:
        """The reverse of :meth:`pieces`, which gave the description.

        ``source`` is asked once, for all that this rank wants. Arguments, result and errors are those of :meth:`load`.
        """
        ...
