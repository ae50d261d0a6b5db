"""From the answers of the hooks to what is shown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

import slapo_core
from slapo_core import Schedule
from slapo_core.spec.pipeline import Liveness, Partition, Stage, Value
from slapo_pipeline.partition.symbolic import with_symbolic_shapes
from slapo_pipeline.view.counting import flops_by_stage
from slapo_pipeline.view.data import Crossing, Stages, StageView

__all__ = ["stages"]


def stages(schedule: Schedule, batch: Any = None, *, whole_output: bool = False) -> Stages:
    """The stages into which the steps of a schedule cut its model: ``print(slapo_pipeline.stages(sch))``.

    Any mesh will do, or none; nothing is built, and the model may be on the meta device.

    Args:
        schedule: with ``pipeline_split`` steps.
        batch: what they are made for, as ``train_step`` takes it; None takes the schedule's example inputs.
        whole_output: whether the last stage needs the whole output, as for ``build(loss=...)``. Without it, it needs
            the loss, where the model computes one.

    Raises:
        ArgumentError: there is no batch, or no step cuts the model.
        TraceError: it cannot be cut there.
    """
    found = slapo_core.stages(schedule, batch, whole_output=whole_output)
    liveness, inputs = found.liveness, found.inputs
    partition = with_symbolic_shapes(found.partition, inputs, {}, lambda other: _asked(schedule, other))
    flops, notes = _flops(schedule.model, inputs, partition)
    tied = {tie.name: tie.stages for tie in partition.ties}
    return Stages(
        partition=partition,
        liveness=liveness,
        model=type(schedule.model).__name__,
        batch={name: _described(value) for name, value in inputs.items()},
        stages=tuple(
            StageView(
                stage.index,
                *_ends(schedule.model, stage),
                _parameters(schedule, stage),
                tuple(name for name, users in tied.items() if stage.index in users),
                flops[stage.index],
                stage.inputs,
                _crossings(partition, liveness, stage.index - 1) if stage.index else (),
                _crossings(partition, liveness, stage.index),
            )
            for stage in partition.stages
        ),
        ties=tied,
        outputs=dict(_pieces(partition)),
        notes=notes,
    )


def _asked(schedule: Schedule, inputs: Mapping[str, Any]) -> Partition | None:
    answer = schedule.hooks.single("slapo_partition", schedule=schedule, inputs=inputs, batch_axes={})
    return None if answer is None else answer[1]


def _flops(model: nn.Module, inputs: Mapping[str, Any], partition: Partition) -> tuple[list[Any], tuple[str, ...]]:
    cuts = [stage.last for stage in partition.stages if stage.last is not None]
    try:
        return list(flops_by_stage(model, inputs, cuts)), ()
    except Exception as error:  # noqa: BLE001 - shown: the stages are what they are without it
        unknown: list[Any] = [None] * len(partition.stages)
        return unknown, (f"operations are not counted: without values, {type(error).__name__}: {error}",)


def _ends(model: nn.Module, stage: Stage) -> tuple[str, str]:
    """The paths of the first and of the last module that a stage holds whole."""
    held: list[str] = []
    known = dict(model.named_modules(remove_duplicate=False))
    for path, module in stage.module.named_modules():
        inside = any(path.startswith(f"{other}.") for other in held)
        if path and not inside and known.get(path) is module:
            held.append(path)
    first = held[0] if held else ""
    return first, stage.last if stage.last is not None else (held[-1] if held else "")


def _parameters(schedule: Schedule, stage: Stage) -> int:
    return sum(
        math.prod(_untouched_shape(schedule, name, parameter)) for name, parameter in stage.module.named_parameters()
    )


def _untouched_shape(schedule: Schedule, name: str, parameter: torch.Tensor) -> tuple[int, ...]:
    path, _, own = name.rpartition(".")
    node: Any = schedule[path] if path else schedule.root
    layout = node.layout(own)
    return tuple(layout.shape if layout.origin else parameter.shape)


def _crossings(partition: Partition, liveness: Liveness, boundary: int) -> tuple[Crossing, ...]:
    """What passes from stage ``boundary`` to the next one."""
    return tuple(_crossing(partition.values[name], boundary) for name in liveness.sent(boundary))


def _crossing(value: Value, boundary: int) -> Crossing:
    shape = value.symbolic_shape if value.symbolic_shape is not None else value.shape
    return Crossing(
        value.name,
        tuple(map(str, shape)),
        str(value.dtype).removeprefix("torch."),
        value.nbytes,
        value.requires_grad,
        value.producer,
        tuple(stage for stage in value.consumers if stage > boundary),
        value.producer != boundary,
    )


def _pieces(partition: Partition) -> Iterator[tuple[str, int]]:
    """The pieces of the output by their names in it, each with the stage that makes it."""
    made = partition.output.assemble({name: name for name in partition.output.pieces})
    for name, piece in _named("", made, set()):
        if piece in partition.values:
            yield name or "output", partition.values[piece].producer


def _named(name: str, part: Any, seen: set[int]) -> Iterator[tuple[str, str]]:
    """Every text in nested values, by where it is; objects by their attributes."""
    if isinstance(part, str):
        yield name, part
        return
    if isinstance(part, Mapping):
        below = [(str(key), each) for key, each in part.items()]
    elif isinstance(part, tuple | list):
        below = [(str(index), each) for index, each in enumerate(part)]
    else:
        below = list(getattr(part, "__dict__", {}).items())
    if id(part) in seen:  # an object that leads back to itself
        return
    seen.add(id(part))
    for key, each in below:
        yield from _named(f"{name}.{key}" if name else key, each, seen)


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return repr(value) if isinstance(value, bool | int | float | str | type(None)) else type(value).__name__
