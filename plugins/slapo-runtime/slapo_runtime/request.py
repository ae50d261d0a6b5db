"""The interface of a build for dialects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from slapo_core.dialect import ScheduledModel
    from slapo_runtime.partition import Liveness, Output, Partition
    from slapo_runtime.state import LiveTensor, ModelState, Placement

__all__ = [
    "BuildRequest",
    "LossFunction",
    "OptimizerFactory",
    "StagedBatch",
    "StagedModel",
]

OptimizerFactory = Callable[[Any], Any]
"""Makes the optimizer of the list of the engine's parameters: ``lambda params: torch.optim.AdamW(params, lr=1e-4)``."""

LossFunction = Callable[[Any, Any], Any]
"""``loss(output, batch)``, a scalar tensor."""


class StagedModel(Protocol):
    """The stages of a model, for one input signature and one mode; their modules are those of the live model."""

    @property
    def partition(self) -> Partition:
        """The stages, the values that they make, and how the output is assembled."""
        ...

    @property
    def liveness(self) -> Liveness:
        """The values that each stage sends to the next."""
        ...


class StagedBatch(Protocol):
    """A batch that was cut into micro-batches of one input signature, and their stages."""

    @property
    def staged(self) -> StagedModel:
        """The stages of each micro-batch."""
        ...

    @property
    def inputs(self) -> Sequence[Mapping[str, Any]]:
        """Of each micro-batch, the arguments of the model's forward by parameter; every rank has them all."""
        ...

    def loss(self, number: int, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss of a micro-batch, a scalar tensor.

        Args:
            number: of the micro-batch.
            values: of its output, by name, as the last stage has them.

        Raises:
            BuildError: there is no loss in the output, or the user's function gives no scalar.
        """
        ...


class BuildRequest(Protocol):
    """The interface of a build, from which a dialect makes its engine.

    When ``Dialect.build`` is called, all ranks agree about the schedule, the plugins, the versions and these
    arguments, and, unless the dialect takes the tensors in turn, every tensor has its values.
    """

    @property
    def schedule(self) -> ScheduledModel:
        """The schedule, with every step applied."""
        ...

    @property
    def state(self) -> ModelState:
        """The model's state to and from the reference layout; it stays right for the life of the engine."""
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
        """The number of micro-batches of a training step; see :meth:`micro_batches`."""
        ...

    @property
    def device(self) -> torch.device | None:
        """The device for the model; None leaves the model where it is."""
        ...

    @property
    def placement(self) -> Placement | None:
        """The placement of tensors on pipeline ranks; None for one pipeline rank.

        What this rank does not hold is a placeholder on the meta device, in ``schedule.model`` and in
        ``state.tensors()`` (:attr:`~slapo_runtime.state.LiveTensor.is_local`).
        """
        ...

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The pipeline rank of each stage; empty for one pipeline rank."""
        ...

    def inputs_of(self, batch: Any) -> dict[str, Any]:
        """Bind a batch to the parameters of the model's forward.

        What is there for ``loss(output, batch)`` alone is left out.

        Raises:
            ArgumentError: the forward does not take it.
        """
        ...

    def stages(
        self,
        inputs: Mapping[str, Any],
        *,
        training: bool,
        outputs: Sequence[str] | Callable[[Output], Sequence[str]] | None = None,
        batch_axes: Mapping[str, int | None] | None = None,
    ) -> StagedModel | None:
        """Return the stages for an input signature, cached for the most recent ones.

        To be called when all tensors are in their places, on every rank alike. The form is names, plain values, and
        shapes, types, devices and need of a gradient of the tensors, with the mode of every module and what is trained.

        Args:
            inputs: as :meth:`inputs_of` gives them, of a micro-batch.
            training: for the mode of a training step, else for an evaluation; the model's own mode comes back.
            outputs: names of the values of the output that the last stage needs, or a function that picks them; None:
                all of them.
            batch_axes: as the hook `slapo_partition` says.

        Returns:
            None where no step cuts the model.

        Raises:
            TraceError: it cannot be cut there.
            HookError: a plugin's answer is invalid.
        """
        ...

    def staged(
        self,
        batch: Any,
        count: int,
        *,
        training: bool,
        axes: Mapping[str, int | None] | None = None,
        option: str = "",
        prepare: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
    ) -> StagedBatch:
        """Cut a batch into micro-batches, and find their stages.

        As :meth:`micro_batches`, :meth:`inputs_of` and :meth:`stages`; the last stage needs what the loss is found in.
        Nothing is communicated.

        Args:
            batch: in any form of ``train_step``.
            count: of micro-batches.
            training: for a training step, else for an evaluation.
            axes: as for :meth:`micro_batches`; ``option`` too.
            prepare: makes what the stages are given of the arguments of the model's forward, by parameter, as a runtime
                of lower precision casts them; the loss is found of the batch as it came.

        Returns:
            ``staged`` of it is the same object for batches of the same form, as long as it is kept.

        Raises:
            BuildError: the batch cannot be cut, the model has another number of stages for it than it was built with,
                or there is no loss.
            TraceError: the model cannot be cut for it.
        """
        ...

    def staged_example(
        self,
        count: int,
        *,
        axes: Mapping[str, int | None] | None = None,
        prepare: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
    ) -> StagedBatch:
        """Call :meth:`staged` for a training step on the example inputs, uncut if they cannot be cut.

        For what needs stages before a batch has come. Those of the first step are the same if it has their form.
        """
        ...

    def part(self, partition: Partition) -> nn.Module:
        """Return a module with this rank's modules and tensors at the reference paths, without a forward.

        Args:
            partition: of the model, for any input signature.
        """
        ...

    def materialize(self) -> Iterator[LiveTensor]:
        """Give the model its values, one tensor after the other, in registration order.

        Only for a dialect with ``takes_tensors = True``; it must take them all. Each tensor is in its place in the
        model when it comes; what else was in memory for its sake is released before the next one. Those that only other
        ranks along ``pp`` hold do not come.

        Raises:
            WeightsError: the weights do not fit, or a tensor on the meta device cannot be initialized.
        """
        ...

    def make_optimizer(self, *, partitioned: bool = False) -> torch.optim.Optimizer | None:
        """Call the user's factory with every parameter of the scheduled model, and check the optimizer.

        Where the mesh has several ranks along ``pp``, with those that this rank holds. A rank that holds none has the
        optimizer that the factory makes of any, with empty groups.

        Args:
            partitioned: whether the runtime gives the optimizer parts of parameters, besides what the schedule splits.

        Returns:
            None if the user gave no factory: the engine then only evaluates.

        Raises:
            RankMismatchError: ranks along ``pp`` have other groups of parameters, or other settings of them.
            OptimizerError: it made something else, left out parameters that need training, took foreign ones, or is not
                known to be element-wise where a parameter is split or pipeline stages divide them (Adafactor, LBFGS).
        """
        ...

    def micro_batches(
        self,
        batch: Any,
        count: int | None = None,
        *,
        axes: Mapping[str, int | None] | None = None,
        option: str = "",
    ) -> list[Any]:
        """Cut a batch into ``accumulate`` micro-batches of equal size, along the first axis of every tensor.

        Each goes through :meth:`compute_loss` and backward, its loss divided by their number, and after the last one
        come :meth:`clip_gradients` and the optimizer's step. For a dialect with ``accumulates = True``.

        Args:
            batch: the whole one.
            count: for a pipeline: how many, by its option ``microbatches``, instead of ``accumulate``.
            axes: for an argument of the forward: the axis of its tensors that counts the samples; None: every piece
                has them whole.
            option: that gives the number, for messages; "" for the two of slapo.

        Raises:
            BuildError: the samples do not divide, or tensors differ in their number.
        """
        ...

    def compute_loss(self, batch: Any, forward: Callable[..., Any] | None = None) -> tuple[torch.Tensor, Any]:
        """Call the model on a batch in any form that ``train_step`` takes.

        With gradients enabled it is a training step's call: a model in evaluation mode as a whole is put into training
        mode, with a warning. Until the first training step has ended (with :meth:`clip_gradients`, or a step of the
        optimizer), the ranks of a replica compare their batches, and its tensor-parallel ranks make their random states
        agree.

        Args:
            batch: a mapping (keyword arguments), a tuple or list (positional arguments), or one argument.
            forward: what to call, such as a wrapper around the model; None calls the model.

        Returns:
            the loss, a scalar tensor, and the output.

        Raises:
            BuildError: there is no loss in the output, or the user's function gives no scalar; or torch computes
                gradients, and the loss depends on nothing that is trained.
            RankMismatchError: in the first step, the ranks of one replica were given different batches.
        """
        ...

    def evaluate(self, batch: Any) -> tuple[torch.Tensor, Any]:
        """Compute the loss in evaluation mode without gradients, and restore every module's mode."""
        ...

    def training(self, batch: Any) -> AbstractContextManager[None]:
        """Prepare a training step as :meth:`compute_loss` does, around all passes of a pipeline's step.

        A model in evaluation mode as a whole is put into training mode, and in the first step the ranks are compared.

        Args:
            batch: the whole batch of the replica.

        Raises:
            RankMismatchError: in the first step, the ranks of one replica were given different batches.
        """
        ...

    def evaluating(self, batch: Any) -> AbstractContextManager[None]:
        """Prepare an evaluation as :meth:`evaluate` does, around all passes of a pipeline's step."""
        ...

    def loss_of(self, output: Any, batch: Any) -> torch.Tensor:
        """Return the loss of an output assembled from stages, a scalar tensor.

        Raises:
            BuildError: as for :meth:`compute_loss`.
        """
        ...

    def sum_tied_gradients(self, attribute: str = "grad") -> None:
        """Sum the gradients of parameters tied across pipeline ranks: a collective.

        Every rank calls it in each step, after the passes and before :meth:`clip_gradients`; whether replicas are
        averaged before or after it is the same. All of these ranks get the same sum to the last bit. A rank without a
        gradient adds nothing; where none of them has one, there is none after it. Nothing is done without such ties.

        Args:
            attribute: of parameters that has the gradient, e.g. ``"main_grad"`` where the runtime keeps it there.

        Raises:
            BuildError: on all of these ranks: a gradient is sparse.
        """
        ...

    def clip_gradients(self) -> torch.Tensor | None:
        """Scale all gradients so that their norm over all ranks is at most ``max_grad_norm``: a collective.

        Over all stages too; a parameter that several of them use counts once. Replicas (``dp``) must hold the same,
        averaged gradients by then, and ties their sums (:meth:`sum_tied_gradients`).

        Returns:
            the norm before, a scalar tensor, the same on every rank; None where ``max_grad_norm`` is None.
        """
        ...

    def together(self, what: str) -> AbstractContextManager[None]:
        """Let no rank go on alone: if the block raises on one rank, every rank raises.

        No collectives inside, but for :meth:`make_optimizer` and further blocks of this kind. ``Dialect.build`` as a
        whole is such a block.

        Args:
            what: the work of the block, for the message on the other ranks, e.g. ``"making the optimizer"``.

        Raises:
            BuildError: on the ranks where the block went well, naming the rank where it did not, and why.
        """
        ...
