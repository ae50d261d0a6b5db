"""The stages of a schedule: asked of the plugins, checked, and run one after another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.errors import ArgumentError, HookError
from slapo_core.internals import buffers_of, children_of, parameters_of
from slapo_core.private import non_persistent_buffers_of, pytree
from slapo_runtime.partition import Liveness, Partition, Stage
from slapo_runtime.pipeline.batches import bound_batch, in_mode
from slapo_runtime.pipeline.checks import (
    SharedState,
    StateMark,
    check_liveness,
    check_partition,
    held_by,
    made_problems,
)

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_runtime.read_only import ScheduledCopy


# `Staged`: the stages of a model with what passes between them, and the run of one after the other.


@dataclass(frozen=True)
class Staged:
    """Hold the stages of a model for one input signature and mode.

    Args:
        partition: the stages.
        liveness: what each of them sends to the next.
        partition_by: the plugin that cut the model, e.g. ``"slapo-pipeline 0.1.0"``.
        liveness_by: the plugin that said what passes.
    """

    partition: Partition
    liveness: Liveness
    partition_by: str = "the caller"
    liveness_by: str = "the caller"

    def run(self, inputs: Mapping[str, Any]) -> Any:
        """Run the stages one after another; return the model's output.

        They are kept apart as processes are: a value that is said to carry no gradient carries none, and what a stage
        gets, from the batch or from another one, is its own: writing to it changes nothing elsewhere.

        Args:
            inputs: the arguments of the model's forward, by parameter.

        Raises:
            HookError: a stage makes something else than was said, or changes a tensor that others hold too.
        """
        own = [_copied({name: inputs[name] for name in stage.inputs if name in inputs}) for stage in self._stages]
        shared = SharedState(self._stages)
        values: dict[str, torch.Tensor] = {}
        received: dict[str, torch.Tensor] = {}
        for stage, given in zip(self._stages, own, strict=True):
            made = self._made(stage, given, {name: received[name] for name in stage.uses})
            self._refuse(stage, shared.changed())
            values.update((name, made[name]) for name in self.partition.output.names if name in made)
            there = {**received, **made}
            received = {name: self._sent(name, there[name]) for name in self.liveness.sent(stage.index)}
        return self.partition.output.assemble(values)

    @property
    def _stages(self) -> tuple[Stage, ...]:
        return self.partition.stages

    def _made(self, stage: Stage, given: dict[str, Any], values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        try:
            made = stage.module(given, values)
        except Exception as error:
            error.add_note(f"in {_place(stage)}, made by {self.partition_by}")
            raise
        self._refuse(stage, made_problems(made, stage, self.partition))
        return made  # type: ignore[no-any-return]

    def _refuse(self, stage: Stage, problems: Sequence[str]) -> None:
        if problems:
            raise HookError(
                f"{_place(stage)}, made by {self.partition_by}, does not match its declaration: {'; '.join(problems)}",
                plugin=self.partition_by,
            )

    def _sent(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.clone(memory_format=torch.contiguous_format)
        return own if self.partition.values[name].requires_grad else own.detach()


def staged(
    schedule: Schedule | ScheduledCopy,
    inputs: Mapping[str, Any],
    *,
    outputs: Sequence[str] | None = None,
    batch_axes: Mapping[str, int | None] | None = None,
) -> Staged | None:
    """Ask the plugins for the stages of a schedule; None if no plugin cuts it.

    Args:
        schedule: its model is in the mode that is asked for.
        inputs: the arguments of the model's forward, by parameter.
        outputs: values of the output that the last stage needs; None: all of them.
        batch_axes: as the hook `slapo_partition` says.

    Raises:
        TraceError: it cannot be cut there.
        HookError: an answer is invalid, or there is one about the partition and none about liveness.
    """
    before = {name: StateMark(tensor) for name, tensor in held_by(schedule.model)}
    random = torch.get_rng_state()
    answer = schedule.hooks.single(
        "slapo_partition", schedule=schedule, inputs=inputs, batch_axes=dict(batch_axes or {})
    )
    if answer is None:
        return None
    plugin, partition = answer
    now = dict(held_by(schedule.model))
    changed = [f"'{name}'" for name, mark in before.items() if not mark.holds(now.get(name))]
    changed += ["the random state"] if not torch.equal(random, torch.get_rng_state()) else []
    if changed:
        raise HookError(
            f"{plugin} changes {', '.join(changed[:3])} while it makes the stages (slapo_partition)", plugin=plugin
        )
    check_partition(partition, plugin, schedule.model)
    needed = tuple(partition.output.names if outputs is None else outputs)
    return needing(schedule, Staged(partition, Liveness(()), plugin), needed)


def needing(schedule: Schedule | ScheduledCopy, found: Staged, outputs: Sequence[str]) -> Staged:
    """Return the stages with liveness for other required outputs.

    Args:
        schedule: that they were asked for.
        found: the stages.
        outputs: values of the output that the last stage needs.

    Raises:
        HookError: as for :func:`staged`.
    """
    needed = tuple(outputs)
    answer = schedule.hooks.single("slapo_liveness", partition=found.partition, outputs=needed)
    if answer is None:
        raise HookError(
            f"{found.partition_by} cut the model into stages, and no active plugin says what passes between them "
            "(slapo_liveness)",
            plugin=found.partition_by,
            hint='create_schedule(model, plugins=["slapo-pipeline"])',
        )
    plugin, liveness = answer
    check_liveness(liveness, found.partition, needed, plugin)
    return replace(found, liveness=liveness, liveness_by=plugin)


def _place(stage: Stage) -> str:
    return f"stage {stage.index}" + (f" (up to '{stage.last}')" if stage.last is not None else " (the last)")


def _copied(inputs: dict[str, Any]) -> dict[str, Any]:
    """Copy the tensors of arguments."""
    known: dict[int, torch.Tensor] = {}  # what is one object in the batch stays one

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return known.setdefault(id(leaf), leaf) if id(leaf) in known else known.setdefault(id(leaf), leaf.clone())

    return pytree.tree_map(own, inputs)  # type: ignore[no-any-return]


# This rank's part of the model: the modules of its stages, at the reference paths.


class Part(nn.Module):
    """Hold the modules of this rank's stages, without a forward.

    ``part.get_submodule("encoder.layer.3")`` is the module of the scheduled model, the same object, where it runs on
    this rank. What stands at the path of a module that lies above a cut only holds what is below.

    Args:
        model: the scheduled one.
        stages: modules of the stages.
    """

    def __init__(self, model: nn.Module, stages: Iterable[nn.Module]) -> None:
        super().__init__()
        self.__dict__["_model"] = model  # no module of this one
        own = set(model.modules())
        for stage in stages:
            _merge(self, stage, own)

    def train(self, mode: bool = True) -> Part:
        """Set the mode of the whole model; call it on all ranks."""
        if "_model" in self.__dict__:
            self.__dict__["_model"].train(mode)
        return super().train(mode)  # type: ignore[return-value]

    def forward(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError("this is one rank's part of the model: call engine.train_step(batch) or eval_step")


class _Above(nn.Module):
    """Above a cut."""


def _merge(into: nn.Module, stage: nn.Module, own: set[nn.Module]) -> None:
    for name, parameter in parameters_of(stage).items():
        if name not in parameters_of(into):
            into.register_parameter(name, parameter)
    for name, buffer in buffers_of(stage).items():
        if name not in buffers_of(into):
            into.register_buffer(name, buffer, persistent=name not in non_persistent_buffers_of(stage))
    for name, child in children_of(stage).items():
        there = children_of(into).get(name)
        if child is None or there in own:
            continue
        if child in own:
            into.add_module(name, child)
            continue
        if there is None:  # what is above several stages is another object in each of them
            there = _Above()
            into.add_module(name, there)
        _merge(there, child, own)


# The stages of a schedule, for scripts and plugins that look at them: as ``build`` asks for them.


@dataclass(frozen=True)
class StageAnswers:
    """Hold the plugins' answers.

    Args:
        partition: the stages.
        liveness: what each of them sends to the next.
        inputs: the batch that they were made for: the arguments of the model's forward, by parameter.
    """

    partition: Partition
    liveness: Liveness
    inputs: Mapping[str, Any]


def stages(schedule: Schedule, batch: Any = None, *, whole_output: bool = False) -> StageAnswers:
    """Return the stages of a schedule, and the values sent between them.

    They are those of a training step: where every module is in evaluation mode, they are asked for in training mode.

    Args:
        schedule: with cuts.
        batch: what they are made for, as ``train_step`` takes it; None takes the schedule's example inputs.
        whole_output: whether the last stage needs the whole output, as for ``build(loss=...)``. Without it, it needs
            the loss, where the model computes one.

    Returns:
        an object with ``partition``, ``liveness`` and ``inputs``; see `slapo_runtime.partition`.

    Raises:
        ArgumentError: there is no batch, or no step cuts the model.
        TraceError: it cannot be cut there.
        HookError: a plugin's answer is invalid.
    """
    batch = schedule.example_inputs if batch is None else batch
    if batch is None:
        raise ArgumentError(
            "stages need a batch: none was given, and the schedule has no example inputs",
            hint="stages(sch, {'input_ids': ids}), or create_schedule(model, example_inputs={'input_ids': ids})",
        )
    inputs = bound_batch(schedule.model, batch, for_loss=whole_output)
    with in_mode(list(schedule.model.modules()), training=True):
        found = staged(schedule, inputs)
        if found is not None and not whole_output and found.partition.output.loss is not None:
            found = needing(schedule, found, (found.partition.output.loss,))
    if found is None:
        raise ArgumentError(
            "no step cuts this model into stages", hint='sch["encoder.layer.5"].pipeline_split() cuts after that module'
        )
    return StageAnswers(found.partition, found.liveness, inputs)
