"""The context of a build: what a dialect makes its engine from."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.errors import BuildError
from slapo_core.layout import accelerator
from slapo_runtime.batches import (
    InputSignature,
    bound_batch,
    in_mode,
    labels_left_out,
    micro_batches,
    signature_of,
)
from slapo_runtime.consistency import FirstSteps
from slapo_runtime.gradients import GradientClipper, TiedGradients
from slapo_runtime.losses import LossCall, LossWeights, Scales, require_items_read, trained
from slapo_runtime.private import tree_map_only
from slapo_runtime.stages import Outputs, Part, StagedModel, ask
from slapo_runtime.weights.lr_scheduler import make_lr_scheduler
from slapo_runtime.weights.optimizer import make_optimizer, same_groups, warn_of_lost_updates
from slapo_runtime.world import together

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_runtime.build import Arguments
    from slapo_runtime.correspondence.state import ModelState
    from slapo_runtime.correspondence.storage import LiveTensor, Placement
    from slapo_runtime.stages.partition import Output, Partition
    from slapo_runtime.weights.materialize import Materialization


OptimizerFactory = Callable[[Any], Any]
"""Makes the optimizer of the list of the engine's parameters: ``lambda params: torch.optim.AdamW(params, lr=1e-4)``."""

LossFunction = Callable[[Any, Any], Any]
"""``loss(output, batch)``, a scalar tensor."""


def switch_to_training(model: nn.Module) -> None:
    """Switch a model entirely in evaluation mode to training mode, with a warning.

    ``from_pretrained`` gives such models, and ``model.eval()`` between two steps leaves one: without dropout, and with
    the running statistics of batch norms, it would train something else. Where some module is in training mode, the
    modes are deliberate (a frozen batch norm), and stay.
    """
    if model.training or any(module.training for module in model.modules()):
        return
    model.train()
    warnings.warn(
        f"{type(model).__name__} was in evaluation mode as a whole (as from_pretrained() gives it, or after .eval()): "
        "a training step puts it into training mode, with dropout; to keep modules as they are in evaluation, call "
        "model.train() and then .eval() on those",
        stacklevel=4,
    )


@dataclass(frozen=True)
class StagedBatch:
    """A batch that was cut into micro-batches of one input signature, and their stages.

    Args:
        staged: the stages of each micro-batch.
        batches: the micro-batches, with the batch's structure.
        inputs: of each, the arguments of the model's forward by parameter.
        loss_call: finds the loss.
        scales: of the losses of the micro-batches; None where they count equally.
    """

    staged: StagedModel
    batches: Sequence[Any]
    inputs: Sequence[Mapping[str, Any]]
    loss_call: LossCall
    scales: Scales | None = None

    def loss(self, number: int, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss of a micro-batch, a scalar tensor.

        Args:
            number: of the micro-batch.
            values: of its output, by name, as the last stage has them.

        Raises:
            BuildError: there is no loss in the output, or the user's function gives no scalar.
        """
        loss = self.loss_call.loss_of(self.staged.partition.output.assemble(values), self.batches[number])
        return trained(loss if self.scales is None else self.scales.apply(loss, number))


def _loss(output: Output) -> tuple[str, ...]:
    return (output.loss,) if output.loss is not None else ()


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """Detach a micro-batch's tensor from the version counter of the whole batch."""
    return tensor if tensor.requires_grad else tensor.data


class BuildContext:
    """A build as a dialect sees it: the model, its state, and the user's arguments, to make an engine from.

    When ``Dialect.build`` is called, all ranks agree about the schedule, the plugins, the versions and the arguments,
    and, unless the dialect takes the tensors one by one, every tensor has its values.

    Args:
        schedule: all ranks have the same.
        arguments: the user's arguments of ``build``.
        values: the tensors and their values.
        stage_ranks: the rank along ``pp`` of each stage; empty where there is one.

    Attributes:
        schedule: the schedule, with every step applied.
        state: the model's state to and from the reference layout; it stays right for the life of the engine.
        optimizer: the user's factory, for a runtime that must call it itself; see :meth:`make_optimizer`.
        accumulate: the number of micro-batches of a training step; see :meth:`micro_batches`.
        device: for the model; None leaves the model where it is.
        stage_ranks: the pipeline rank of each stage; empty for one pipeline rank.
        schedules_learning_rate: whether the dialect has taken the user's scheduler, if there is one.
    """

    def __init__(
        self,
        schedule: Schedule,
        arguments: Arguments,
        values: Materialization,
        *,
        stage_ranks: tuple[int, ...] = (),
    ) -> None:
        self.schedule: Schedule = schedule
        self.state: ModelState = values.state
        self.optimizer: OptimizerFactory | None = arguments.optimizer
        self.accumulate: int = arguments.accumulate
        self.device: torch.device | None = arguments.torch_device()
        self.stage_ranks: tuple[int, ...] = stage_ranks
        self._arguments, self._values, self._mesh = arguments, values, schedule.mesh
        self._first = FirstSteps(schedule.mesh, schedule.model, values.state)
        self._loss_call = LossCall(schedule.model, arguments.loss)
        self._clipper: GradientClipper | None = None
        self._tied: TiedGradients | None = None
        self._is_cut = False  # a batch, before
        self.schedules_learning_rate = arguments.lr_scheduler is None
        self._originals = {id(tensor): name for name, tensor in values.reference.items()}

    def materialize(self) -> Iterator[LiveTensor]:
        """Give the model its values, one tensor after the other, in registration order.

        Only for a dialect with ``takes_tensors = True``; it must take them all. Each tensor is in its place in the
        model when it comes; what else was in memory for its sake is released before the next one. Those that only other
        ranks along ``pp`` hold do not come.

        Raises:
            WeightsError: the weights do not fit, or a tensor on the meta device cannot be initialized.
        """
        return self._values.run()

    def make_optimizer(
        self, *, partitioned: bool = False, has_main_weights: bool = False
    ) -> torch.optim.Optimizer | None:
        """Call the user's factory with every parameter of the scheduled model, and check the optimizer.

        Where the mesh has several ranks along ``pp``, with those that this rank holds. A rank that holds none has the
        optimizer that the factory makes of any, with empty groups.

        Args:
            partitioned: whether the runtime gives the optimizer parts of parameters, besides what the schedule splits.
            has_main_weights: whether the optimizer steps copies of the parameters in float32. Without, a warning says
                where parameters in a 16-bit type would lose its updates.

        Returns:
            None if the user gave no factory: the engine then only evaluates.

        Raises:
            RankMismatchError: ranks along ``pp`` have other groups of parameters, or other settings of them.
            OptimizerError: it made something else, left out parameters that need training, took foreign ones, or is not
                known to be element-wise where a parameter is split or pipeline stages divide them (Adafactor, LBFGS).
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
                self._split(partitioned=partitioned),
                is_part=self.placement is not None,
                elementwise=self._arguments.elementwise,
            )
            if optimizer is not None:
                self._first.end_with(optimizer)
                if not has_main_weights:
                    warn_of_lost_updates(optimizer, stacklevel=8)
        if self.placement is not None and optimizer is not None:
            same_groups(self._mesh, optimizer)
        return optimizer

    def make_lr_scheduler(self, optimizer: torch.optim.Optimizer | None) -> Any:
        """Call the user's factory of a scheduler of the learning rate; None if there is none.

        The engine calls its ``step()`` after each step of the optimizer, and not where that was skipped.

        Args:
            optimizer: of torch, whose groups it sets; None where nothing is trained.

        Raises:
            OptimizerError: it made something else, or a scheduler of another optimizer.
        """
        with self.together("making the scheduler of the learning rate"):
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

        What this rank does not hold is a placeholder on the meta device, in ``schedule.model`` and in
        ``state.tensors()`` (:attr:`~slapo_runtime.correspondence.storage.LiveTensor.is_local`).
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
        """Cut a batch into micro-batches, and find their stages.

        As :meth:`micro_batches` does; the last stage needs what the loss is found in. Nothing is communicated but
        the weights of losses.

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
        """Call :meth:`staged` for a training step on the example inputs, uncut if they cannot be cut.

        For what needs stages before a batch has come. Those of the first step are the same if it has their form.
        """
        example = self.schedule.example_inputs
        try:
            batches = self._cut(example, count, "microbatches", axes)
        except BuildError:
            batches = [example]
        return self._staged(batches, training=True, axes=axes, prepare=prepare)

    @functools.cached_property
    def _stages(self) -> Stages:
        return Stages(self.schedule)  # when all tensors are in their places

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
        _require_one_signature(inputs)
        pick = None if for_loss else _loss  # one object, by which stages are looked up
        staged = self._stages.of(inputs[0], training=training, outputs=pick, batch_axes=axes)
        built_with = len(self.stage_ranks)
        if staged is None or len(staged.partition.stages) != built_with:
            found = 1 if staged is None else len(staged.partition.stages)
            raise BuildError(
                f"the model was built with {built_with} stages, and has {found} for this batch",
                hint="give batches of the form of example_inputs",
            )
        if pick is not None and not pick(staged.partition.output):
            self._loss_call.loss_of(staged.partition.output.assemble({}), None)  # says that there is none
        require_items_read(
            self.schedule.model, inputs[0], {name for stage in staged.partition.stages for name in stage.inputs}
        )
        own = [tree_map_only(torch.Tensor, _apart, one) for one in inputs]
        return StagedBatch(staged, batches, own, self._loss_call, scales)

    def part(self, partition: Partition) -> torch.nn.Module:
        """Return a module with this rank's modules and tensors at the reference paths, without a forward.

        Args:
            partition: of the model, for any input signature.
        """
        assert self._mesh is not None
        own = self._mesh.rank("pp")
        stages = [stage.module for stage in partition.stages if self.stage_ranks[stage.index] == own]
        return Part(self.schedule.model, stages)

    def _split(self, *, partitioned: bool) -> dict[int, list[int]]:
        """Return the sharded axes of parameters, by their identity."""
        found: dict[int, list[int]] = {}
        for live in self.state.tensors():
            if partitioned and live.is_parameter and live.is_local:
                found[id(live.tensor)] = list(range(live.tensor.dim()))
            for mesh_dim, axis in live.layout.shards():
                if self._mesh is not None and self._mesh.size(mesh_dim) > 1:
                    found.setdefault(id(live.tensor), []).append(axis)
        return found

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
        batches = self._split_batch(batch, count, axes=axes, option=option)
        if torch.is_grad_enabled():
            self._weights.prepare(batches)
        return batches

    def _split_batch(
        self, batch: Any, count: int | None, *, axes: Mapping[str, int | None] | None, option: str
    ) -> list[Any]:
        """Cut a batch, and warn once where micro-batches of unequal weight count equally."""
        option = option or ("accumulate" if count is None else "microbatches")
        count = self.accumulate if count is None else count
        batches = self._cut(batch, count, option, axes)
        if len(batches) > 1 and not self._is_cut and not self._weights.applies(batch):
            self._is_cut = True
            reason = labels_left_out(batches)
            if reason is not None:
                warnings.warn(reason, stacklevel=4)
        return batches

    def _cut(self, batch: Any, count: int, option: str, axes: Mapping[str, int | None] | None) -> list[Any]:
        by_place: dict[Any, int | None] = {**(axes or {})}
        if not isinstance(batch, Mapping):
            names = list(signature_of(self.schedule.model).parameters)
            by_place |= {place: by_place[name] for place, name in enumerate(names) if name in by_place}
        return micro_batches(batch, count, option=option, axes=by_place)

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

        A model in evaluation mode as a whole is put into training mode, and in the first step the ranks are compared.

        Args:
            batch: the whole batch of the replica.

        Raises:
            RankMismatchError: in the first step, the ranks of one replica were given different batches.
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
        """Say that the first training step has ended, where neither the user's optimizer nor :meth:`clip_gradients` do.

        Later steps do not compare the ranks. It may be called again.
        """
        self._first.training_is_over()

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
        if self._tied is None:
            self._tied = TiedGradients(self._values.correspondence)
        self._tied.sum(attribute)

    def clip_gradients(self) -> torch.Tensor | None:
        """Scale all gradients so that their norm over all ranks is at most ``max_grad_norm``: a collective.

        Over all stages too; a parameter that several of them use counts once. Replicas (``dp``) must hold the same,
        averaged gradients by then, and ties their sums (:meth:`sum_tied_gradients`).

        Returns:
            the norm before, a scalar tensor, the same on every rank; None where ``max_grad_norm`` is None.
        """
        self._first.training_is_over()
        if self._arguments.max_grad_norm is None:
            return None
        if self._clipper is None:
            self._clipper = GradientClipper(self._values.correspondence, self._arguments.max_grad_norm)
        return self._clipper.clip()

    def together(self, what: str) -> AbstractContextManager[None]:
        """Let no rank go on alone: if the block raises on one rank, every rank raises.

        No collectives inside, but for :meth:`make_optimizer` and further blocks of this kind. ``Dialect.build`` as a
        whole is such a block.

        Args:
            what: the work of the block, for the message on the other ranks, e.g. ``"making the optimizer"``.

        Raises:
            BuildError: on the ranks where the block went well, naming the rank where it did not, and why.
        """
        return together(self._mesh, what)


def _require_one_signature(inputs: Sequence[Mapping[str, Any]]) -> None:
    """Refuse micro-batches that need stages of their own: lists with an item for each sample may hold other sizes."""
    for name, value in inputs[0].items():
        if isinstance(value, (Mapping, tuple, list)):
            first = InputSignature({name: value}, ())
            if any(InputSignature({name: one.get(name)}, ()) != first for one in inputs[1:]):
                raise BuildError(
                    f"'{name}' differs between micro-batches in its structure, its plain values, or the shapes of its "
                    "tensors, and the stages of a pipeline are the same for all of them",
                    hint=f"pad what '{name}' holds to one size; or leave it to the loss: build(sch, ..., "
                    f"loss=lambda output, batch: ...), which may read batch['{name}']",
                )


_FORMS = 16  # that are kept


class Stages:
    """Cache the stages of a materialized model for the most recent input signatures.

    Args:
        schedule: the schedule to build.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._modules = list(schedule.model.modules())
        self._parameters = list(schedule.model.parameters())
        self._kept: list[tuple[Any, InputSignature, StagedModel | None]] = []  # those that came last, last
        self._has_warned = False

    def of(
        self,
        inputs: Mapping[str, Any],
        *,
        training: bool,
        outputs: Outputs,
        batch_axes: Mapping[str, int | None] | None,
    ) -> StagedModel | None:
        """Return the stages for an input signature.

        To be called when all tensors are in their places, on every rank alike. The signature is names, plain values,
        and shapes, types, devices and need of a gradient of the tensors, with the mode of every module and what is
        trained.

        Args:
            inputs: the arguments of the model's forward, by parameter, of a micro-batch.
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
        with in_mode(self._modules, training=training):
            form = InputSignature(inputs, [module.training for module in self._modules])
            if form.unknown is not None:
                if not self._has_warned:
                    self._has_warned = True
                    warnings.warn(
                        f"an argument of the model is of type {form.unknown}, whose values are not compared: the model "
                        "is recorded and cut into stages again in every step",
                        stacklevel=2,
                    )
                return ask(self._schedule, inputs, outputs, batch_axes)
            key = (
                [(parameter.requires_grad, parameter.dtype) for parameter in self._parameters],  # runtimes convert them
                outputs if outputs is None or callable(outputs) else tuple(outputs),
                dict(batch_axes or {}),
                _autocast(),
            )
            known = next((one for one in reversed(self._kept) if one[0] == key and one[1] == form), None)
            if known is None:
                known = (key, form, ask(self._schedule, inputs, outputs, batch_axes))
            self._kept = [*[one for one in self._kept if one is not known][1 - _FORMS :], known]
        return known[2]


def _autocast() -> tuple[Any, ...]:
    kinds = ("cpu", *({device.type} if (device := accelerator()) is not None else ()))
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
