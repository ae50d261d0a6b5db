"""The stages of one scheduled model, made once for every input signature."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from slapo_core.errors import HookError
from slapo_core.internals import module_index
from slapo_runtime.batches import InputSignature
from slapo_runtime.partition import Partition
from slapo_runtime.schedule_copies import ScheduledCopy
from slapo_runtime.stages import StagedModel, staged
from slapo_verify.private import buffers_of

if TYPE_CHECKING:
    from slapo_core.primitive import Record
    from slapo_core.schedule.schedule import Schedule


# `StagedCalls`: the stages of one scheduled model, made once for every input signature and every mode.


class StagedCalls:
    """Asks the plugins for stages, and keeps them.

    Args:
        schedule: its model is in the mode in which it is to run whenever stages are asked for.
        outputs: see :func:`~slapo_runtime.stages.staged`.
        batch_axes: likewise.
        answers: shared by the copies of one model; None: its own.
    """

    def __init__(
        self,
        schedule: Schedule | ScheduledCopy,
        *,
        outputs: Sequence[str] | None = None,
        batch_axes: Mapping[str, int | None] | None = None,
        answers: Answers | None = None,
    ) -> None:
        self._schedule, self._outputs, self._batch_axes = schedule, outputs, batch_axes
        self._answers = answers if answers is not None else Answers()
        self._known: list[tuple[InputSignature, StagedModel | None]] = []

    def of(self, inputs: Mapping[str, Any]) -> StagedModel | None:
        """Return the stages for a call; None where no plugin cuts the model.

        Args:
            inputs: the arguments of the model's forward, by parameter.

        Raises:
            TraceError: it cannot be cut there.
            HookError: a plugin's answer is invalid, or contradicts that for a batch of another size.
        """
        form = InputSignature(inputs, [module.training for module in self._schedule.model.modules()])
        for known, stages in self._known:
            if known == form:
                return stages
        made = self._answers.of_copies(self._schedule, form, [self._schedule.model])
        if made is None:
            made = staged(self._schedule, inputs, outputs=self._outputs, batch_axes=self._batch_axes)
            if made is not None and not self._batch_axes:
                self._answers.add(self._schedule, form, made)
        self._known.append((form, made))
        return made


class Answers:
    """Keep stages of one model's copies, to bind them to further copies."""

    def __init__(self) -> None:
        self._known: list[tuple[Sequence[Record], Any, InputSignature, StagedModel]] = []

    def of_copies(
        self, schedule: Schedule | ScheduledCopy, form: InputSignature, models: Sequence[nn.Module]
    ) -> StagedModel | None:
        """Return stages made of a copy with the same records and input signature.

        Args:
            schedule: of the first copy.
            form: of the batch, and the modes.
            models: one for each stage, or one for all of them.
        """
        structured = module_index.structure(schedule.model)
        for steps, known_structure, known, made in self._known:
            if known_structure == structured and known == form and [*map(id, steps)] == [*map(id, schedule.records)]:
                partition = made.partition
                each = models if len(models) > 1 else [*models] * len(partition.stages)
                bound = partition.bind(each) if partition.bind is not None else None
                if bound is not None:
                    return dataclasses.replace(made, partition=bound)
        return None

    def add(self, schedule: Schedule | ScheduledCopy, form: InputSignature, made: StagedModel) -> None:
        """Keep an answer."""
        self._known.append((schedule.records, module_index.structure(schedule.model), form, made))


# The stages of one model, each with modules of its own: like processes they share parameters and buffers at most.


class IsolatedStagedCalls:
    """Make each stage of another copy of the modules, with the same tensors.

    State that modules keep in attributes does not pass from one stage to the next then, as it would
    not between processes; gradients and the optimizer's steps are those of the one model. The plugins are asked about
    every copy, as they are on every rank, and must say the same.

    Args:
        schedule: says where to cut.
        model: a private copy of its model; the first stage is made of it.
        answers: see :class:`~slapo_verify.stage_calls.StagedCalls`.
    """

    def __init__(self, schedule: Schedule, model: nn.Module, *, answers: Answers | None = None) -> None:
        self._schedule, self._model = schedule, model
        self._answers = answers if answers is not None else Answers()
        self._calls = [StagedCalls(ScheduledCopy(schedule, model), answers=self._answers)]
        self.copies: list[nn.Module] = []
        self._pairs: list[tuple[nn.Module, nn.Module]] = []  # what stands in a copy for a module of the model

    def of(self, inputs: Mapping[str, Any]) -> StagedModel | None:
        """As :meth:`slapo_verify.stage_calls.StagedCalls.of`.

        Raises:
            HookError: a plugin says something else about another copy, too.
        """
        first = self._calls[0].of(inputs)
        if first is None:
            return None
        while len(self._calls) < len(first.partition.stages):
            made = _around_the_same_tensors(self._model)
            self.copies.append(made)
            self._pairs += zip(self._model.modules(), made.modules(), strict=True)
            self._calls.append(StagedCalls(ScheduledCopy(self._schedule, made), answers=self._answers))
        for ours, theirs in self._pairs:
            theirs.training = ours.training
        models = [self._model, *self.copies[: len(first.partition.stages) - 1]]
        bound = first.partition.bind(models) if first.partition.bind is not None else None
        if bound is not None:
            return dataclasses.replace(first, partition=bound)
        found = [first, *(calls.of(inputs) for calls in self._calls[1 : len(first.partition.stages)])]
        for other in found:
            if other is None or _as_data(other) != _as_data(first):
                raise HookError(
                    f"{first.partition_by} and {first.liveness_by} make other stages of another copy of the same "
                    "model, and so would on another rank",
                    plugin=first.partition_by,
                    hint="let names and their order follow from the model and the schedule alone",
                )
        stages = tuple(each.partition.stages[number] for number, each in enumerate(found) if each is not None)
        return dataclasses.replace(first, partition=dataclasses.replace(first.partition, stages=stages))

    def take_back(self, staged: StagedModel) -> None:
        """Give the model the buffers that its stages have put in the places of others."""
        for stage in staged.partition.stages[1:]:
            for name, buffer in stage.module.named_buffers():
                path, _, own = name.rpartition(".")
                try:
                    owner = self._model.get_submodule(path)
                except AttributeError:  # a constant of the stage's own
                    continue
                if own in buffers_of(owner):
                    buffers_of(owner)[own] = buffer


def _around_the_same_tensors(model: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, {**module_index.made_beforehand(model), **memo})


def _as_data(staged: StagedModel) -> Any:
    """Return the stages' declaration, without modules."""
    partition: Partition = staged.partition
    stages = [(each.index, each.inputs, each.uses, each.makes, each.last) for each in partition.stages]
    return stages, list(partition.values.items()), partition.ties, partition.output.names, staged.liveness
