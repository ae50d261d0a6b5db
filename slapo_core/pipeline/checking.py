"""Whether what two plugins answered about stages fits together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from slapo_core.errors import HookError
from slapo_core.pipeline.forms import liveness_forms, partition_forms
from slapo_core.pipeline.sharing import held_by, holders
from slapo_core.spec.pipeline import Liveness, Partition, Stage

__all__ = ["check_liveness", "check_partition", "made_problems"]


def check_partition(
    partition: Partition, plugin: str, *, model: nn.Module | None = None, inputs: Mapping[str, Any] | None = None
) -> None:
    """Refuse an answer to `slapo_partition` that contradicts itself, or the model that it was asked about.

    Args:
        partition: the answer.
        plugin: whose it is, e.g. ``"slapo-pipeline 0.1.0"``.
        model: that it was asked about; None does not look at the modules of the stages.
        inputs: the arguments that it was asked about; None does not look at what the stages read of them.

    Raises:
        HookError: every contradiction.
    """
    problems = list(partition_forms(partition)) or list(_of_partition(partition))
    if not problems and inputs is not None:
        problems += _of_inputs(partition, inputs)
    if not problems and model is not None:
        problems += _of_modules(partition, model)
    _refuse("slapo_partition", plugin, problems)


def check_liveness(liveness: Liveness, partition: Partition, outputs: Sequence[str], plugin: str) -> None:
    """Refuse an answer to `slapo_liveness` that leaves a stage without what it reads, or sends what is not there.

    Args:
        liveness: the answer.
        partition: what it was asked about.
        outputs: pieces of the output that the last stage needs.
        plugin: whose answer it is.

    Raises:
        HookError: every contradiction.
    """
    problems = list(liveness_forms(liveness)) or list(_of_liveness(liveness, partition, outputs))
    _refuse("slapo_liveness", plugin, problems)


def made_problems(made: Any, stage: Stage, partition: Partition) -> list[str]:
    """What is wrong with what a stage gave, held against what was said about it; in words."""
    if not isinstance(made, dict):
        return [f"it gives a {type(made).__name__}, not a dictionary"]
    missing = [f"it does not make '{name}'" for name in stage.makes if name not in made]
    more = [f"it makes '{name}' too" for name in made if name not in stage.makes]
    return (
        missing + more + [text for name in stage.makes if name in made for text in _made(made[name], name, partition)]
    )


def _made(tensor: Any, name: str, partition: Partition) -> Iterator[str]:
    value = partition.values[name]
    if not isinstance(tensor, torch.Tensor):
        yield f"'{name}' is a {type(tensor).__name__}, not a tensor"
    elif (tuple(tensor.shape), tensor.dtype) != (tuple(value.shape), value.dtype):
        yield f"'{name}' is {tuple(tensor.shape)} of {tensor.dtype}, not {tuple(value.shape)} of {value.dtype}"


def _refuse(hook: str, plugin: str, problems: list[str]) -> None:
    if problems:
        raise HookError(f"the answer of {plugin} to {hook} cannot be right: {'; '.join(problems)}", plugin=plugin)


def _of_partition(partition: Partition) -> Iterator[str]:
    if [stage.index for stage in partition.stages] != list(range(len(partition.stages))):
        yield "the stages are not numbered from 0 in their order"
        return
    for stage in partition.stages:
        if (stage.last is None) != (stage.index == len(partition.stages) - 1):
            yield f"stage {stage.index} of {len(partition.stages)} is said to end after {stage.last!r}"
    makers: dict[str, int] = {}
    for stage in partition.stages:
        for name in stage.makes:
            if name in makers:
                yield f"stages {makers[name]} and {stage.index} both make '{name}'"
            makers[name] = stage.index
    for name, value in partition.values.items():
        readers = tuple(stage.index for stage in partition.stages if name in stage.uses)
        if makers.get(name) != value.producer:
            yield f"'{name}' is said to be made by stage {value.producer}, which does not make it"
        if readers != value.consumers:
            yield f"'{name}' is said to be read by the stages {value.consumers}, and {readers} read it"
        if any(reader <= value.producer for reader in readers):
            yield f"'{name}' is read before stage {value.producer} has made it"
    known = set(partition.values)
    for stage in partition.stages:
        for name in (*stage.uses, *stage.makes):
            if name not in known:
                yield f"nothing is said about '{name}' of stage {stage.index}"
    for name in partition.output.pieces:
        if name not in known:
            yield f"nothing is said about the piece '{name}' of the output"


def _of_inputs(partition: Partition, inputs: Mapping[str, Any]) -> Iterator[str]:
    for stage in partition.stages:
        for name in stage.inputs:
            if name not in inputs:
                yield f"stage {stage.index} reads the argument '{name}', which this batch does not give"


def _of_modules(partition: Partition, model: nn.Module) -> Iterator[str]:
    """Whether the stages hold the model's own tensors, at the reference paths, and what several hold is a tie."""
    tensors = dict(held_by(model))
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    for stage in partition.stages:
        if stage.last is not None and stage.last not in dict(stage.module.named_modules(remove_duplicate=False)):
            yield f"stage {stage.index} is said to end after '{stage.last}', which it does not hold"
        for name, tensor in held_by(stage.module):
            if tensors.get(name, None if isinstance(tensor, nn.Parameter) else tensor) is not tensor:
                which = "is not the model's" if name in tensors else "is none of the model's"
                yield f"'{name}' of stage {stage.index} {which}"
    said = {tie.name: tie.stages for tie in partition.ties}
    found = {
        first[key]: where
        for key, (_, tensor, where) in holders(partition.stages).items()
        if isinstance(tensor, nn.Parameter) and key in first
    }
    for name in dict.fromkeys((*found, *said)):
        if name not in said:
            yield f"'{name}' is held by the stages {_numbers(found[name])}, and no tie says so"
        elif name not in found:
            yield f"'{name}' is said to be tied over the stages {_numbers(said[name])}, and is not held by several"
        elif said[name] != found[name]:
            yield (
                f"'{name}' is said to be tied over the stages {_numbers(said[name])}, and is held by "
                f"{_numbers(found[name])}"
            )


def _of_liveness(liveness: Liveness, partition: Partition, outputs: Sequence[str]) -> Iterator[str]:
    last = len(partition.stages) - 1
    if len(liveness.boundaries) != last:
        yield f"{len(partition.stages)} stages have {last} boundaries, and it names {len(liveness.boundaries)}"
        return
    for stage in partition.stages:
        there = {*liveness.received(stage.index), *stage.makes}
        for name in stage.uses:
            if name not in liveness.received(stage.index):
                yield f"stage {stage.index} reads '{name}', which it is not sent"
        for name in liveness.sent(stage.index):
            if name not in there:
                yield f"stage {stage.index} is to send '{name}', which it has not"
        if len(set(liveness.sent(stage.index))) != len(liveness.sent(stage.index)):
            yield f"stage {stage.index} sends a value twice"
    for name in outputs:
        if name not in {*liveness.received(last), *partition.stages[last].makes}:
            yield f"the last stage needs '{name}' for the loss, and it is not sent"


def _numbers(stages: Sequence[int]) -> str:
    return ", ".join(map(str, stages))
