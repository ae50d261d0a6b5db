"""The context of a build: model, state and arguments for a dialect's engine."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.dialect import StepResult
from slapo_core.errors import BuildError, warn_user
from slapo_core.internals import Internals
from slapo_runtime.batches import (
    ForwardSignature,
    bound_batch,
    labels_left_out,
    micro_batches,
    switch_to_training,
)
from slapo_runtime.data import ReplicaSampler
from slapo_runtime.gradients import GradientClipper, TiedGradients
from slapo_runtime.losses import LossCall, LossWeights, Scales, require_items_read, trained
from slapo_runtime.private import tree_map_only
from slapo_runtime.ranks.consistency import FirstSteps
from slapo_runtime.ranks.world import together
from slapo_runtime.stages import RankModule, StagedModel
from slapo_runtime.stages.signatures import StagedModels, require_one_signature
from slapo_runtime.weights.full_matrix import FullMatrixSteps
from slapo_runtime.weights.lr_scheduler import make_lr_scheduler
from slapo_runtime.weights.optimizer import make_optimizer, same_groups, warn_of_lost_updates
from slapo_runtime.weights.parameter_groups import GroupedFactory

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_runtime.build import UserArguments
    from slapo_runtime.correspondence.storage import LiveTensor, Placement, Window
    from slapo_runtime.stages.partition import Output, Partition
    from slapo_runtime.weights.materialize import Materialization
    from slapo_runtime.weights.parameter_groups import ParameterGroups
    from slapo_runtime.weights.state import ModelState


OptimizerFactory = Callable[[Any], Any]
"""Makes the optimizer of the list of the engine's parameters: ``lambda params: torch.optim.AdamW(params, lr=1e-4)``."""

LossFunction = Callable[[Any, Any], Any]
"""``loss(output, batch)``, a scalar tensor."""


@dataclass(frozen=True)
class StagedBatch:
    """A batch cut into micro-batches of one input signature, with their stages.

    Args:
        staged: the stages of each micro-batch.
        batches: the micro-batches, with the batch's structure.
        inputs: of each, the arguments of the model's forward by parameter.
        loss_call: finds the loss.
        scales: of the losses of the micro-batches; None for equal weights.
    """

    staged: StagedModel
    batches: Sequence[Any]
    inputs: Sequence[Mapping[str, Any]]
    loss_call: LossCall
    scales: Scales | None = None

    def loss(self, number: int, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compute the loss of a micro-batch, a scalar tensor.

        Args:
            number: of the micro-batch.
            values: of its output, by name, on the last stage.

        Raises:
            BuildError: there is no loss in the output, or the user's function does not give a scalar.
        """
        loss = self.loss_call.loss_of(self.staged.partition.output.assemble(values), self.batches[number])
        return trained(loss if self.scales is None else self.scales.apply(loss, number))


def _loss(output: Output) -> tuple[str, ...]:
    return (output.loss,) if output.loss is not None else ()


def _learning_rate(optimizer: Any) -> Any:
    """Return that of the first group with one, which a later change leaves as it is."""
    groups: Any = getattr(optimizer, "param_groups", ())
    rate = next((group["lr"] for group in groups if "lr" in group), None)
    return rate.detach().clone() if isinstance(rate, torch.Tensor) else rate


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """Detach a micro-batch's tensor from the version counter of the full batch."""
    return tensor if tensor.requires_grad else tensor.data


class BuildContext:
    """Give a dialect the model, its state, and the user's arguments for its engine.

    When ``Dialect.build`` is called, all ranks agree about the schedule, the plugins, the versions and the arguments,
    and, unless the dialect takes the tensors one by one, every tensor has its values.

    Args:
        schedule: the same on all ranks.
        arguments: the user's arguments of ``build``.
        values: the tensors and their values.
        groups: of the parameters, by the user's patterns; None without any.
        stage_ranks: the rank along ``pp`` of each stage; empty for one pipeline rank.

    Attributes:
        schedule: the schedule, with every step applied.
        state: the model's state to and from the reference layout; it stays valid for the life of the engine.
        optimizer: the user's factory of a list of parameters, for a runtime that must call it itself; see
            :meth:`make_optimizer`.
        accumulate: the number of micro-batches of a training step; see :meth:`micro_batches`.
        device: for the model; None leaves the model where it is.
        model_device: the device of the tensors after the build.
        stage_ranks: the pipeline rank of each stage; empty for one pipeline rank.
        schedules_learning_rate: whether the dialect has taken the user's scheduler, if there is one.
        has_groups_of_parameters: whether an optimizer has the user's parameter groups, if there are any.
    """

    def __init__(
        self,
        schedule: Schedule,
        arguments: UserArguments,
        values: Materialization,
        groups: ParameterGroups | None = None,
        *,
        stage_ranks: tuple[int, ...] = (),
    ) -> None:
        self.schedule: Schedule = schedule
        self.state: ModelState = values.state
        self.optimizer: OptimizerFactory | None = arguments.optimizer
        if groups is not None and self.optimizer is not None:
            self.optimizer = GroupedFactory(self.optimizer, groups)
        self.accumulate: int = arguments.accumulate
        self.device: torch.device | None = arguments.torch_device()
        self.stage_ranks: tuple[int, ...] = stage_ranks
        self.model_device: torch.device = values.device
        self._arguments, self._values, self._mesh = arguments, values, schedule.mesh
        self._first = FirstSteps(schedule.mesh, schedule.model, values.state)
        self._loss_call = LossCall(schedule.model, arguments.loss)
        self._clipper: GradientClipper | None = None
        self._tied: TiedGradients | None = None
        self._is_cut = False  # a batch, before
        self._optimizer: torch.optim.Optimizer | None = None
        self._begun: tuple[float, Any] = (0.0, None)  # the time of the present step, and its learning rate
        self.schedules_learning_rate = arguments.lr_scheduler is None
        self.has_groups_of_parameters = groups is None or self.optimizer is not None
        self._groups = groups
        self._originals = {id(tensor): name for name, tensor in values.reference.items()}

    def materialize(
        self,
        *,
        windows: Callable[[LiveTensor], Window] | None = None,
        dtype: Callable[[LiveTensor], torch.dtype | None] | None = None,
    ) -> Iterator[LiveTensor]:
        """Give the model its values, one tensor after the other, in registration order.

        Only for a dialect with ``takes_tensors = True``; it must take them all. Each tensor is in its place in the
        model when it is yielded; temporary memory for it is released before the next one. Tensors of other pipeline
        ranks alone are left out.

        Args:
            windows: for a runtime that divides parameters by rows: this rank's window of a parameter's local shape. It
                alone is read, and the parameter has shape, type and device, but no memory until :meth:`fill_windows`.
                A parameter that is not on the meta device keeps its full values.
            dtype: for a runtime that stores parameters in another type: gives it, equal on all ranks; None keeps a
                parameter's own.

        Raises:
            WeightsError: the weights do not fit, or a tensor on the meta device cannot be initialized.
        """
        return self._values.run(windows, dtype)

    def fill_windows(self, module: torch.nn.Module) -> None:
        """Give a module's parameters without memory their full memory, with the values of this rank's window alone.

        They are other objects then, in all modules inside.
        """
        self._values.fill_windows(module)

    def make_optimizer(
        self, *, partitioned: bool = False, has_main_weights: bool = False, gathers: bool = False
    ) -> torch.optim.Optimizer | None:
        """Call the user's factory with this rank's parameters, and check the optimizer.

        A pipeline rank without parameters gets an optimizer of the factory's groups, all empty.

        Args:
            partitioned: whether the runtime gives the optimizer shards of parameters, besides the schedule's shards.
            has_main_weights: whether the optimizer steps copies of the parameters in float32. Without, a warning names
                parameters in a 16-bit type that would lose its updates.
            gathers: whether an optimizer of full matrices (Adafactor, Muon) gathers split parameters in its ``step()``.
                The runtime then calls ``step()`` on every rank, leaves gradients in ``grad``, and may put DTensors of
                torch's ``fully_shard`` into the groups before the first step.

        Returns:
            None if the user gave no factory: the engine then only evaluates.

        Raises:
            RankMismatchError: the parameter groups or their settings differ between ranks along ``pp``.
            OptimizerError: the factory made something else, omitted trained parameters, took foreign ones, or its
                optimizer is not known to be element-wise for parameters that are split or divided by pipeline stages
                (Adafactor, LBFGS).
        """
        with self.together("making the optimizer"):
            named = dict(self.schedule.model.named_parameters())
            elsewhere = {id(live.tensor): live.name for live in self.state.tensors() if not live.is_local}
            parameters = {name: one for name, one in named.items() if id(one) not in elsewhere}
            foreign = {key: f"'{name}' of the reference model" for key, name in self._originals.items()}
            foreign |= {key: f"'{name}' of another pipeline stage" for key, name in elsewhere.items()}
            optimizer = make_optimizer(
                parameters,
                self.optimizer,
                foreign,
                self.state.sharded_axes(partitioned=partitioned),
                is_part=self.placement is not None,
                elementwise=self._arguments.elementwise,
                by_parameter=self._is_by_parameter,
                gathers=functools.partial(FullMatrixSteps, state=self.state) if gathers else None,
            )
            if optimizer is not None:
                self._first.end_with(optimizer)
                if not has_main_weights:
                    warn_of_lost_updates(optimizer, stacklevel=8)
        if self.placement is not None and optimizer is not None:
            same_groups(self._mesh, optimizer)
        self._optimizer = optimizer
        return optimizer

    def _is_by_parameter(self, kind: type) -> bool:
        """Ask the plugins whether an optimizer's update of a parameter depends on that full parameter alone."""
        answer = Internals(self.schedule).hooks.single("slapo_full_matrix", optimizer=kind)
        return answer is not None and bool(answer[1])

    def parameter_groups(self) -> list[dict[str, Any]] | None:
        """Return the user's groups of this rank's parameters, for a runtime that makes an optimizer of its own.

        They are groups of ``torch.optim`` with the settings of ``no_decay`` and ``param_groups`` only; a pipeline rank
        may have empty ones. None if the user gave neither.
        """
        if self._groups is None:
            return None
        self.has_groups_of_parameters = True
        return self._groups.of(live.tensor for live in self.state.tensors() if live.is_parameter and live.is_local)  # type: ignore[misc]

    def make_lr_scheduler(self, optimizer: torch.optim.Optimizer | None) -> Any:
        """Call the user's factory of a learning-rate scheduler; None if there is none.

        The engine calls its ``step()`` after each step of the optimizer, except after a skipped one.

        Args:
            optimizer: of torch, whose groups it sets; None where nothing is trained.

        Raises:
            OptimizerError: the factory made something else, or a scheduler of another optimizer.
        """
        with self.together("making the learning-rate scheduler"):
            return make_lr_scheduler(self.lr_scheduler, optimizer)

    @property
    def lr_scheduler(self) -> Callable[[Any], Any] | None:
        """The user's factory, for a runtime that must call it itself."""
        self.schedules_learning_rate = True
        factory: Callable[[Any], Any] | None = self._arguments.lr_scheduler
        return factory

    @functools.cached_property
    def _weights(self) -> LossWeights:
        here = [live.tensor for live in self.state.tensors() if live.is_local]
        device = self.device or next((tensor.device for tensor in here), torch.device("cpu"))
        dtypes = {tensor.dtype for tensor in here if tensor.is_floating_point()}
        widest = functools.reduce(torch.promote_types, dtypes, torch.float32)
        return LossWeights(self._mesh, self.schedule.model, self._arguments.loss_weight, device, widest)

    @property
    def placement(self) -> Placement | None:
        """The placement of tensors on pipeline ranks; None for one pipeline rank.

        Tensors of other ranks are placeholders on the meta device, in ``schedule.model`` and in ``state.tensors()``
        (:attr:`~slapo_runtime.correspondence.storage.LiveTensor.is_local`).
        """
        return self._values.correspondence.placement

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
        """Cut a batch into micro-batches as :meth:`micro_batches`, and find their stages.

        The last stage gives the values of the loss. Only the weights of losses are communicated.

        Args:
            batch: any batch of ``train_step``.
            count: of micro-batches.
            training: for a training step, else for an evaluation.
            axes: as for :meth:`micro_batches`; ``option`` too.
            prepare: converts the arguments of the model's forward, by parameter, for the stages, e.g. casts to a lower
                precision; the loss is computed from the original batch.

        Returns:
            the micro-batches; ``staged`` is the same object for batches with the same input signature, while cached.

        Raises:
            BuildError: the batch cannot be cut, the model has another number of stages for it than it was built with,
                or there is no loss.
            TraceError: the model cannot be cut for it.
        """
        batches = self._split_batch(batch, count, axes=axes, option=option)
        scales = self._weights.scales(batches, training=training)
        if scales is not None:
            scales.read()  # on every rank: the last stage alone would refuse them
        return self._staged(batches, training=training, axes=axes, prepare=prepare, scales=scales)

    def staged_example(
        self,
        count: int,
        *,
        axes: Mapping[str, int | None] | None = None,
        prepare: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
    ) -> StagedBatch:
        """Call :meth:`staged` for a training step on the example inputs.

        For stages before the first batch; inputs that cannot be cut stay uncut. A first step with the same input
        signature uses the same stages.
        """
        example = self.schedule.example_inputs
        try:
            batches = self._cut(example, count, "microbatches", axes)
        except BuildError:
            batches = [example]
        return self._staged(batches, training=True, axes=axes, prepare=prepare)

    def forget_stages(self) -> None:
        """Make the stages again for each input signature, after hooks or types changed."""
        self.__dict__.pop("_stages", None)

    @functools.cached_property
    def _stages(self) -> StagedModels:
        return StagedModels(self.schedule)  # when all tensors are in their places

    def _staged(
        self,
        batches: Sequence[Any],
        *,
        training: bool,
        axes: Mapping[str, int | None] | None,
        prepare: Callable[[dict[str, Any]], Mapping[str, Any]] | None,
        scales: Scales | None = None,
    ) -> StagedBatch:
        """Find the stages of micro-batches."""
        batches = [self._weights.divided(one, len(batches)) for one in batches]
        for_loss = self._arguments.loss is not None
        inputs: list[Mapping[str, Any]] = [bound_batch(self.schedule.model, one, for_loss=for_loss) for one in batches]
        if prepare is not None:
            inputs = [prepare(dict(one)) for one in inputs]
        require_one_signature(inputs)
        pick = None if for_loss else _loss  # one object, by which stages are looked up
        staged = self._stages.of(inputs[0], training=training, outputs=pick, batch_axes=axes)
        built_with = len(self.stage_ranks)
        if staged is None or len(staged.partition.stages) != built_with:
            found = 1 if staged is None else len(staged.partition.stages)
            raise BuildError(
                f"the model was built with {built_with} stages, but has {found} for this batch",
                hint="give batches with the structure of example_inputs",
            )
        if pick is not None and not pick(staged.partition.output):
            self._loss_call.loss_of(staged.partition.output.assemble({}), None)  # says that there is none
        require_items_read(
            self.schedule.model, inputs[0], {name for stage in staged.partition.stages for name in stage.inputs}
        )
        own = [tree_map_only(torch.Tensor, _apart, one) for one in inputs]
        return StagedBatch(staged, batches, own, self._loss_call, scales)

    def part(self, partition: Partition) -> torch.nn.Module:
        """Return this rank's modules and tensors at the reference paths, without a forward.

        Args:
            partition: of the model, for any input signature.
        """
        assert self._mesh is not None
        own = self._mesh.rank("pp")
        stages = [stage.module for stage in partition.stages if self.stage_ranks[stage.index] == own]
        return RankModule(self.schedule.model, stages)

    def micro_batches(
        self,
        batch: Any,
        count: int | None = None,
        *,
        axes: Mapping[str, int | None] | None = None,
        option: str = "",
    ) -> list[Any]:
        """Cut a batch into ``accumulate`` equal micro-batches, along the first axis of tensors.

        Each goes through :meth:`compute_loss` and backward, with its loss divided by their number; after the last one
        come :meth:`clip_gradients` and the optimizer's step. For a dialect with ``accumulates = True``.

        Args:
            batch: a batch of ``train_step``.
            count: for a pipeline: their number, by its option ``microbatches``, instead of ``accumulate``.
            axes: for an argument of the forward: the axis of its tensors that counts the samples; None: every
                micro-batch has the full tensors.
            option: the option with the number, for messages; "" for the two of slapo.

        Raises:
            BuildError: the samples do not divide, or tensors differ in their number.
        """
        batches = self._split_batch(batch, count, axes=axes, option=option)
        if torch.is_grad_enabled():
            self._weights.prepare(batches)
        return batches

    def _split_batch(
        self, batch: Any, count: int | None, *, axes: Mapping[str, int | None] | None, option: str
    ) -> list[Any]:
        """Cut a batch, the beginning of a step, and warn once of equal weights for unequal micro-batches."""
        self._begun = time.perf_counter(), _learning_rate(self._optimizer)
        option = option or ("accumulate" if count is None else "microbatches")
        count = self.accumulate if count is None else count
        batches = self._cut(batch, count, option, axes)
        if len(batches) > 1 and not self._is_cut:
            self._is_cut = True
            self._warn_of_last_batch(count, option)
            reason = None if self._weights.applies(batch) else labels_left_out(batches)
            if reason is not None:
                warn_user(reason)
        return batches

    def _warn_of_last_batch(self, count: int, option: str) -> None:
        """Warn at the first step of a batch at the end of the epoch that cannot be cut."""
        for one in self.state.saving.attached.values():
            if isinstance(one, ReplicaSampler) and one.last_batch % count:
                warn_user(
                    f"the last batch of an epoch has {one.last_batch} samples, not divisible by {option}={count}: its "
                    "step will be refused; sampler(..., drop_last=True) leaves it out"
                )

    def _cut(self, batch: Any, count: int, option: str, axes: Mapping[str, int | None] | None) -> list[Any]:
        by_place: dict[Any, int | None] = {**(axes or {})}
        if not isinstance(batch, Mapping):
            names = list(ForwardSignature.of(self.schedule.model).signature.parameters)
            by_place |= {place: by_place[name] for place, name in enumerate(names) if name in by_place}
        return micro_batches(batch, count, option=option, axes=by_place)

    def compute_loss(self, batch: Any, forward: Callable[..., Any] | None = None) -> tuple[torch.Tensor, Any]:
        """Call the model on a batch of ``train_step``, and find its loss.

        With gradients enabled it is a training step's call: a model entirely in evaluation mode is switched to training
        mode, with a warning. Until the end of the first training step (:meth:`clip_gradients`, or a step of the
        optimizer), the ranks of a replica compare their batches, and its tensor-parallel ranks synchronize their RNG
        states.

        Args:
            batch: a mapping (keyword arguments), a tuple or list (positional arguments), or one argument.
            forward: called instead of the model, e.g. a wrapper around it.

        Returns:
            the loss, a scalar tensor, and the output.

        Raises:
            BuildError: there is no loss in the output, or the user's function does not give a scalar; or, with
                gradients enabled, no trained parameter contributes to the loss.
            RankMismatchError: in the first step, the ranks of one replica have different batches.
        """
        if torch.is_grad_enabled():
            switch_to_training(self.schedule.model)
        with self._first.watched(batch):
            own, scales, number = self._weights.of(batch)
            given = self._weights.probe(own)
            with self._first.forward(self.schedule) as check:
                loss, output = self._loss_call(given, forward)
                check(loss)
            self._weights.check_divided(loss, given)
        return trained(loss if scales is None else scales.apply(loss, number)), output

    def evaluate(self, batch: Any) -> tuple[torch.Tensor, Any]:
        """Compute the loss in evaluation mode without gradients, and restore every module's mode."""
        with self.evaluating(batch):
            own, scales, number = self._weights.of(batch)
            loss, output = self._loss_call(own)
            return loss if scales is None else scales.apply(loss, number), output

    @contextlib.contextmanager
    def training(self, batch: Any) -> Iterator[None]:
        """Prepare a training step as :meth:`compute_loss` does, around all passes of a pipeline's step.

        A model entirely in evaluation mode is switched to training mode, and in the first step the ranks are compared.

        Args:
            batch: the full batch of the replica.

        Raises:
            RankMismatchError: in the first step, the ranks of one replica have different batches.
        """
        switch_to_training(self.schedule.model)
        with self._first.watched(batch):
            yield

    @contextlib.contextmanager
    def evaluating(self, batch: Any) -> Iterator[None]:
        """Prepare an evaluation as :meth:`evaluate` does, around all passes of a pipeline's step."""
        modes = [(module, module.training) for module in self.schedule.model.modules()]
        self.schedule.model.eval()
        try:
            with torch.no_grad(), self._first.watched(batch):
                yield
        finally:
            for module, training in modes:
                module.training = training

    def training_is_over(self) -> None:
        """Mark the end of the first training step, as :meth:`clip_gradients` does.

        Later steps do not compare the ranks. It may be called again.
        """
        self._first.training_is_over()

    def sum_tied_gradients(self, attribute: str = "grad") -> None:
        """Sum the gradients of parameters tied across pipeline ranks: a collective.

        Every rank calls it in each step, after the passes and before :meth:`clip_gradients`, before or after replicas
        are averaged. All ranks of a tie get the same sum to the last bit. A rank without a gradient adds nothing; if no
        rank has one, there is none afterwards. Without such ties it does nothing.

        Args:
            attribute: the parameters' attribute with the gradient, e.g. ``"main_grad"``.

        Raises:
            BuildError: on all of these ranks: a gradient is sparse.
        """
        if self._tied is None:
            self._tied = TiedGradients(self._values.correspondence)
        self._tied.sum(attribute)

    def clip_gradients(self) -> torch.Tensor | None:
        """Clip gradients by ``max_grad_norm`` over all ranks: a collective.

        It covers all stages; a tied parameter counts once. Before it, gradients must be averaged over replicas
        (``dp``), and summed over ties (:meth:`sum_tied_gradients`).

        Returns:
            the norm before clipping, a scalar tensor, the same on every rank; None if ``max_grad_norm`` is None.
        """
        self._first.training_is_over()
        if self._arguments.max_grad_norm is None:
            return None
        if self._clipper is None:
            self._clipper = GradientClipper(self._values.correspondence, self._arguments.max_grad_norm)
        return self._clipper.clip()

    def step_result(self, loss: torch.Tensor, output: Any = None, grad_norm: torch.Tensor | None = None) -> StepResult:
        """Make the result of a training step that began with :meth:`micro_batches` or :meth:`staged`.

        Args:
            loss: see :class:`slapo_core.StepResult`.
            output: see there.
            grad_norm: see there.
        """
        start, rate = self._begun
        return StepResult(loss, output, grad_norm, rate, self._weights.total, time.perf_counter() - start)

    def together(self, what: str) -> AbstractContextManager[None]:
        """Raise on every rank if the block raises on one of them.

        No collectives inside, except :meth:`make_optimizer` and further blocks of this kind. ``Dialect.build`` is such
        a block itself.

        Args:
            what: the work of the block, for the message on the other ranks, e.g. ``"making the optimizer"``.

        Raises:
            BuildError: on the other ranks, naming the rank that failed, and why.
        """
        return together(self._mesh, what)
