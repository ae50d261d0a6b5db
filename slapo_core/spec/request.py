"""What ``build`` hands to a dialect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from slapo_core.spec.mesh import Mesh
    from slapo_core.spec.node import Node
    from slapo_core.spec.record import Record
    from slapo_core.spec.state import LiveTensor, ModelState

__all__ = ["BuildRequest", "HookCaller", "LossFunction", "OptimizerFactory", "ScheduledModel"]

OptimizerFactory = Callable[[Any], Any]
"""Makes the optimiser of the list of the engine's parameters: ``lambda params: torch.optim.AdamW(params, lr=1e-4)``."""

LossFunction = Callable[[Any, Any], Any]
"""``loss(output, batch)``, a scalar tensor."""


class HookCaller(Protocol):
    """The hooks of the plugins that a schedule names."""

    def call(self, name: str, /, **arguments: Any) -> Any:
        """Ask every active plugin: the one answer of a first-result hook (or None), else the list of all answers."""
        ...


class ScheduledModel(Protocol):
    """What a dialect sees of a schedule; reading only."""

    @property
    def model(self) -> nn.Module:
        """The live model, with all steps applied."""
        ...

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that the schedule was made for; None without one."""
        ...

    @property
    def records(self) -> tuple[Record, ...]:
        """What was applied, oldest first."""
        ...

    @property
    def root(self) -> Node:
        """The root of the tree: ``schedule.root["encoder.layer.0"].layout("weight")``."""
        ...

    @property
    def hooks(self) -> HookCaller:
        """The hooks of the plugins named in the schedule, this dialect's own included."""
        ...


class BuildRequest(Protocol):
    """Everything that a dialect needs to make its engine; nothing of it is left out or optional.

    When ``Dialect.build`` is called, all ranks agree about the schedule, the plugins, the versions and these
    arguments, and, unless the dialect takes the tensors in turn, every tensor has its values.
    """

    @property
    def schedule(self) -> ScheduledModel:
        """What is built; every step is applied."""
        ...

    @property
    def state(self) -> ModelState:
        """The model's state to and from the untouched layout; it stays right for the life of the engine."""
        ...

    @property
    def optimizer(self) -> OptimizerFactory | None:
        """The user's factory, for a runtime that must call it itself; see :meth:`make_optimizer`."""
        ...

    @property
    def loss(self) -> LossFunction | None:
        """The user's loss; None takes that of the output. See :meth:`compute_loss`."""
        ...

    @property
    def max_grad_norm(self) -> float | None:
        """The largest L2 norm of all gradients over all ranks; None does not clip. See :meth:`clip_gradients`."""
        ...

    @property
    def accumulate(self) -> int:
        """How many micro-batches a training step takes one after the other; see :meth:`micro_batches`."""
        ...

    @property
    def device(self) -> torch.device | None:
        """Where the user wants the model; None leaves it where it is."""
        ...

    def materialise(self) -> Iterator[LiveTensor]:
        """Give the model its values, one tensor after the other, in registration order.

        Only for a dialect with ``takes_tensors = True``; it must take them all. Each tensor is in its place in the
        model when it comes; what else was in memory for its sake is released before the next one.

        Raises:
            WeightsError: the weights do not fit, or a tensor on the meta device cannot be initialised.
        """
        ...

    def make_optimizer(self) -> torch.optim.Optimizer | None:
        """Call the user's factory with every parameter of the scheduled model, each once, and check what it made.

        Returns:
            None if the user gave no factory: the engine then only evaluates.

        Raises:
            OptimizerError: it made something else, left out parameters that need training, took foreign ones, or makes
                of a piece of a parameter something else than that piece of what it makes of the whole (Adafactor).
        """
        ...

    def micro_batches(self, batch: Any) -> list[Any]:
        """Cut a batch into ``accumulate`` pieces of one size, along the first axis of every tensor.

        Each goes through :meth:`compute_loss` and backward, its loss divided by their number, and after the last one
        come :meth:`clip_gradients` and the optimiser's step. For a dialect with ``accumulates = True``.

        Raises:
            BuildError: the samples do not divide, or tensors differ in their number.
        """
        ...

    def compute_loss(self, batch: Any, forward: Callable[..., Any] | None = None) -> tuple[torch.Tensor, Any]:
        """Call the model on a batch in any form that ``train_step`` takes.

        With gradients enabled it is a training step's call: a model in evaluation mode as a whole is put into training
        mode, with a warning. Until the first training step has ended (with :meth:`clip_gradients`, or a step of the
        optimiser), the tensor-parallel ranks compare their batches and make their random states agree.

        Args:
            batch: a mapping (keyword arguments), a tuple or list (positional arguments), or one argument.
            forward: what to call, such as a wrapper around the model; None calls the model.

        Returns:
            the loss, a scalar tensor, and the output.

        Raises:
            BuildError: there is no loss in the output, or the user's function gives no scalar.
            RankMismatchError: in the first step, the ranks of one replica were given different batches.
        """
        ...

    def evaluate(self, batch: Any) -> tuple[torch.Tensor, Any]:
        """As :meth:`compute_loss`, in evaluation mode and without gradients; the mode of every module is restored."""
        ...

    def clip_gradients(self) -> torch.Tensor | None:
        """Scale all gradients so that their norm over all ranks is at most ``max_grad_norm``: a collective.

        Replicas (``dp``) must hold the same, averaged gradients by then.

        Returns:
            the norm before, a scalar tensor, the same on every rank; None where ``max_grad_norm`` is None.
        """
        ...

    def together(self, what: str) -> AbstractContextManager[None]:
        """Let no rank go on alone: if the block raises on one rank, every rank raises.

        No collectives inside, but for :meth:`make_optimizer` and further blocks of this kind. ``Dialect.build`` as a
        whole is such a block.

        Args:
            what: the work of the block, for the message on the other ranks, e.g. ``"making the optimiser"``.

        Raises:
            BuildError: on the ranks where the block went well, naming the rank where it did not, and why.
        """
        ...
