"""Implement :class:`slapo_runtime.request.BuildRequest`, the interface of a build for dialects."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.errors import BuildError
from slapo_core.private import tree_map_only
from slapo_runtime.building.agreement import FirstSteps
from slapo_runtime.building.batches import LossCall, labels_left_out, micro_batches, trained
from slapo_runtime.building.optimizer import make_optimizer, same_groups
from slapo_runtime.building.target import Stages
from slapo_runtime.pipeline.batches import bound_batch
from slapo_runtime.pipeline.stages import Part
from slapo_runtime.ranks.world import together
from slapo_runtime.weights.gradients import GradientClipper, TiedGradients

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_runtime.building.target import Arguments
    from slapo_runtime.partition import Output, Partition
    from slapo_runtime.request import BuildRequest, StagedModel
    from slapo_runtime.state import LiveTensor, ModelState, Placement
    from slapo_runtime.weights.materialize import Materialization


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
    """Documented in spec/request.py.

    Args:
        staged: the stages of each micro-batch.
        batches: the micro-batches, with the batch's structure.
        inputs: of each, the arguments of the model's forward by parameter.
        request: finds the loss.
    """

    staged: StagedModel
    batches: Sequence[Any]
    inputs: Sequence[Mapping[str, Any]]
    request: BuildRequest

    def loss(self, number: int, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.request.loss_of(self.staged.partition.output.assemble(values), self.batches[number])


def stage_batches(
    request: BuildRequest,
    batches: Sequence[Any],
    *,
    training: bool,
    axes: Mapping[str, int | None] | None,
    prepare: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
) -> StagedBatch:
    """Find the stages of micro-batches; see :meth:`slapo_runtime.request.BuildRequest.staged`."""
    inputs: list[Mapping[str, Any]] = [request.inputs_of(one) for one in batches]
    if prepare is not None:
        inputs = [prepare(dict(one)) for one in inputs]
    pick = _loss if request.loss is None else None  # one object, by which stages are looked up
    staged = request.stages(inputs[0], training=training, outputs=pick, batch_axes=axes)
    built_with = len(request.stage_ranks)
    if staged is None or len(staged.partition.stages) != built_with:
        found = 1 if staged is None else len(staged.partition.stages)
        raise BuildError(
            f"the model was built with {built_with} stages, and has {found} for this batch",
            hint="give batches of the form of example_inputs",
        )
    if pick is not None and not pick(staged.partition.output):
        request.loss_of(staged.partition.output.assemble({}), None)  # says that there is none
    return StagedBatch(staged, batches, [tree_map_only(torch.Tensor, _apart, one) for one in inputs], request)


def _loss(output: Output) -> tuple[str, ...]:
    return (output.loss,) if output.loss is not None else ()


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """Detach a micro-batch's tensor from the version counter of the whole batch."""
    return tensor if tensor.requires_grad else tensor.data


class Request:
    """Made by the hand-over phase; documented in spec/request.py.

    Args:
        schedule: all ranks have the same.
        arguments: the user's arguments of ``build``.
        values: the tensors and their values.
        stage_ranks: the rank along ``pp`` of each stage; empty where there is one.
    """

    def __init__(
        self,
        schedule: Schedule,
        arguments: Arguments,
        values: Materialization,
        *,
        stage_ranks: tuple[int, ...] = (),
    ) -> None:
        self._schedule, self._arguments, self._values = schedule, arguments, values
        self._state = values.state
        self._first = FirstSteps(schedule.mesh, schedule.model, values.state)
        self._mesh = schedule.mesh
        self._loss_call = LossCall(schedule.model, arguments.loss)
        self._clipper: GradientClipper | None = None
        self._tied: TiedGradients | None = None
        self._stage_ranks = stage_ranks
        self._stages: Stages | None = None
        self._is_cut = False  # a batch, before
        self._originals = {id(tensor): name for name, tensor in values.reference.items()}

    @property
    def schedule(self) -> Schedule:
        return self._schedule

    @property
    def state(self) -> ModelState:
        return self._state

    @property
    def optimizer(self) -> Any:
        return self._arguments.optimizer

    @property
    def loss(self) -> Any:
        return self._arguments.loss

    @property
    def max_grad_norm(self) -> float | None:
        return self._arguments.max_grad_norm

    @property
    def accumulate(self) -> int:
        return self._arguments.accumulate

    @property
    def device(self) -> torch.device | None:
        return self._arguments.torch_device()

    def materialize(self) -> Iterator[LiveTensor]:
        return self._values.run()

    def make_optimizer(self, *, partitioned: bool = False) -> torch.optim.Optimizer | None:
        with self.together("making the optimizer"):
            named = dict(self._schedule.model.named_parameters())
            elsewhere = {id(live.tensor): live.name for live in self._state.tensors() if not live.is_local}
            parameters = {name: one for name, one in named.items() if id(one) not in elsewhere}
            foreign = {key: f"'{name}' of the reference model" for key, name in self._originals.items()}
            foreign |= {key: f"'{name}' of another pipeline stage" for key, name in elsewhere.items()}
            optimizer = make_optimizer(
                parameters,
                self._arguments.optimizer,
                foreign,
                self._split(partitioned=partitioned),
                is_part=self.placement is not None,
                elementwise=self._arguments.elementwise,
            )
            if optimizer is not None:
                self._first.end_with(optimizer)
        if self.placement is not None and optimizer is not None:
            same_groups(self._mesh, optimizer)
        return optimizer

    @property
    def placement(self) -> Placement | None:
        return self._values.correspondence.placement

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        return self._stage_ranks

    def inputs_of(self, batch: Any) -> dict[str, Any]:
        return bound_batch(self._schedule.model, batch, for_loss=self.loss is not None)

    def stages(
        self,
        inputs: Mapping[str, Any],
        *,
        training: bool,
        outputs: Sequence[str] | Callable[[Output], Sequence[str]] | None = None,
        batch_axes: Mapping[str, int | None] | None = None,
    ) -> StagedModel | None:
        if self._stages is None:
            self._stages = Stages(self._schedule)
        return self._stages.of(inputs, training=training, outputs=outputs, batch_axes=batch_axes)

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
        batches = self.micro_batches(batch, count, axes=axes, option=option)
        return stage_batches(self, batches, training=training, axes=axes, prepare=prepare)

    def staged_example(
        self,
        count: int,
        *,
        axes: Mapping[str, int | None] | None = None,
        prepare: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
    ) -> StagedBatch:
        example = self._schedule.example_inputs
        try:
            batches = self._cut(example, count, "microbatches", axes)
        except BuildError:
            batches = [example]
        return stage_batches(self, batches, training=True, axes=axes, prepare=prepare)

    def part(self, partition: Partition) -> torch.nn.Module:
        assert self._mesh is not None
        own = self._mesh.rank("pp")
        stages = [stage.module for stage in partition.stages if self._stage_ranks[stage.index] == own]
        return Part(self._schedule.model, stages)

    def _split(self, *, partitioned: bool) -> dict[int, list[int]]:
        """Return the sharded axes of parameters, by their identity."""
        found: dict[int, list[int]] = {}
        for live in self._state.tensors():
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
        option = option or ("accumulate" if count is None else "microbatches")
        count = self._arguments.accumulate if count is None else count
        batches = self._cut(batch, count, option, axes)
        if len(batches) > 1 and not self._is_cut:
            self._is_cut = True
            reason = labels_left_out(batches, option=option)
            if reason is not None:
                warnings.warn(reason, stacklevel=3)
        return batches

    def _cut(self, batch: Any, count: int, option: str, axes: Mapping[str, int | None] | None) -> list[Any]:
        by_place: dict[Any, int | None] = {**(axes or {})}
        if not isinstance(batch, Mapping):
            names = list(inspect.signature(self._schedule.model.forward).parameters)
            by_place |= {place: by_place[name] for place, name in enumerate(names) if name in by_place}
        return micro_batches(batch, count, option=option, axes=by_place)

    def compute_loss(self, batch: Any, forward: Callable[..., Any] | None = None) -> tuple[torch.Tensor, Any]:
        if torch.is_grad_enabled():
            switch_to_training(self._schedule.model)
        with self._first.watched(batch):
            loss, output = self._loss_call(batch, forward)
        return trained(loss), output

    def evaluate(self, batch: Any) -> tuple[torch.Tensor, Any]:
        with self.evaluating(batch):
            return self._loss_call(batch)

    @contextlib.contextmanager
    def training(self, batch: Any) -> Iterator[None]:
        switch_to_training(self._schedule.model)
        with self._first.watched(batch):
            yield

    @contextlib.contextmanager
    def evaluating(self, batch: Any) -> Iterator[None]:
        modes = [(module, module.training) for module in self._schedule.model.modules()]
        self._schedule.model.eval()
        try:
            with torch.no_grad(), self._first.watched(batch):
                yield
        finally:
            for module, training in modes:
                module.training = training

    def loss_of(self, output: Any, batch: Any) -> torch.Tensor:
        return trained(self._loss_call.loss_of(output, batch))

    def sum_tied_gradients(self, attribute: str = "grad") -> None:
        if self._tied is None:
            self._tied = TiedGradients(self._values.correspondence)
        self._tied.sum(attribute)

    def clip_gradients(self) -> torch.Tensor | None:
        self._first.training_is_over()
        if self.max_grad_norm is None:
            return None
        if self._clipper is None:
            self._clipper = GradientClipper(self._values.correspondence, self.max_grad_norm)
        return self._clipper.clip()

    def together(self, what: str) -> AbstractContextManager[None]:
        return together(self._mesh, what)
