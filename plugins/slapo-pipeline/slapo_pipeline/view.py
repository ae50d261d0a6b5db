"""Show the stages of a model: what each holds, computes and sends."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import slapo_core
from slapo_core import Schedule, TraceError
from slapo_graph.flat import FakeMode, children
from slapo_pipeline.balance import run_in_sections
from slapo_pipeline.private import pytree
from slapo_runtime.stages.partition import Liveness, Partition, Stage, Value


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
    found = slapo_core.stages(schedule, batch, full_output=whole_output)
    partition, liveness, inputs = found.partition, found.liveness, found.inputs
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
        outputs=dict(_output_producers(partition)),
        notes=notes,
    )


def _flops(model: nn.Module, inputs: Mapping[str, Any], partition: Partition) -> tuple[list[Any], tuple[str, ...]]:
    cuts = [stage.last for stage in partition.stages if stage.last is not None]
    try:
        return list(flops_by_stage(model, inputs, cuts)), ()
    except TraceError as error:
        unknown: list[Any] = [None] * len(partition.stages)
        return unknown, (f"operations are not counted: {error.message}",)


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
    return sum(math.prod(_full_shape(schedule, name, parameter)) for name, parameter in stage.module.named_parameters())


def _full_shape(schedule: Schedule, name: str, parameter: torch.Tensor) -> tuple[int, ...]:
    path, _, own = name.rpartition(".")
    node: Any = schedule[path] if path else schedule.root
    layout = node.layout(own)
    return tuple(layout.shape if layout.origin else parameter.shape)


def _crossings(partition: Partition, liveness: Liveness, boundary: int) -> tuple[Crossing, ...]:
    """What passes from stage ``boundary`` to the next one."""
    return tuple(_crossing(partition.values[name], boundary) for name in liveness.sent(boundary))


def _crossing(value: Value, boundary: int) -> Crossing:
    return Crossing(
        value.name,
        value.shape,
        str(value.dtype).removeprefix("torch."),
        value.nbytes,
        value.requires_grad,
        value.producer,
        tuple(stage for stage in value.consumers if stage > boundary),
        value.producer != boundary,
    )


def _output_producers(partition: Partition) -> Iterator[tuple[str, int]]:
    """The pieces of the output by their names in it, each with the stage that makes it."""
    made = partition.output.assemble({name: name for name in partition.output.names})
    for name, value in _named("", made):
        if value in partition.values:
            yield name or "output", partition.values[value].producer


def _named(name: str, part: Any) -> Iterator[tuple[str, str]]:
    """Yield every text in nested values, with its path."""
    if isinstance(part, str):
        yield name, part
        return
    for _, key, below in children(part) or ():
        yield from _named(f"{name}.{key}" if name else str(key), below)


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return repr(value) if isinstance(value, bool | int | float | str | type(None)) else type(value).__name__


@dataclass(frozen=True)
class Crossing:
    """A value on its way from one stage to the next.

    Args:
        name: of the value.
        shape: for the batch that the stages were made for.
        dtype: e.g. ``"float32"``.
        nbytes: for the batch that the stages were made for.
        requires_grad: whether a gradient comes back.
        producer: the stage that makes it; where it is not the one that sends it here, the sender relays it.
        consumers: the stages that read it, of those still to come.
        is_relayed: whether the sender only passes it on.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    requires_grad: bool
    producer: int
    consumers: tuple[int, ...]
    is_relayed: bool


@dataclass(frozen=True)
class StageView:
    """One stage.

    Args:
        index: from 0.
        first: path of the first module in it.
        last: path of the last one; for all stages but the last one the module after which it is cut.
        parameters: number of elements of the parameters that it uses, of their full sizes; ties count in each
            stage that has them.
        tied: names of the parameters among them that other stages use too.
        flops: operations of the forward of this rank, for the batch: two for each multiplication and addition of
            matrix products, convolutions and attention. None where they could not be counted.
        inputs: arguments of the model that it reads from the batch.
        received: what it gets from the stage before.
        sent: what it gives to the next one.
    """

    index: int
    first: str
    last: str
    parameters: int
    tied: tuple[str, ...]
    flops: int | None
    inputs: tuple[str, ...]
    received: tuple[Crossing, ...]
    sent: tuple[Crossing, ...]


@dataclass(frozen=True)
class Stages:
    """The stages of a schedule; ``print`` it.

    Args:
        partition: what the stages are, as dialects see them.
        liveness: what passes between them.
        model: the name of its class.
        batch: what the stages were made for, e.g. ``{"input_ids": "(8, 128) int64"}``.
        stages: in the order in which they run.
        ties: the stages that use it, by the name of a parameter.
        outputs: the stage that makes it, by the name of an output of the model, e.g. ``"loss"``.
        notes: what could not be found out, and why.
    """

    partition: Partition = field(repr=False)
    liveness: Liveness = field(repr=False)
    model: str
    batch: dict[str, str]
    stages: tuple[StageView, ...]
    ties: dict[str, tuple[int, ...]]
    outputs: dict[str, int]
    notes: tuple[str, ...] = ()

    def bytes_sent(self, stage: int) -> int:
        """From a stage to the next one, forward, for the batch that the stages were made for."""
        return sum(crossing.nbytes for crossing in self.stages[stage].sent)

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data, without the partition's modules."""
        stages = [dataclasses.asdict(stage) for stage in self.stages]
        plain = {name: getattr(self, name) for name in ("model", "batch", "ties", "outputs", "notes")}
        return {**plain, "stages": stages}

    def __str__(self) -> str:
        return text_of(self)


def flops_by_stage(model: nn.Module, inputs: Mapping[str, Any], cuts: Sequence[str]) -> list[int]:
    """Of the forward between the ends of the calls of the modules that are named.

    Args:
        model: as it is now; a copy runs, which shares its parameters.
        inputs: arguments of its forward, by parameter; their values do not matter.
        cuts: paths, in the order in which the model calls them.

    Raises:
        TraceError: the model raises without values.
    """
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    mode = FakeMode() if device.type != "meta" else None

    def without_values(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return copy.deepcopy(leaf)
        return mode.from_tensor(leaf.detach()) if mode is not None else leaf.detach().to("meta")

    bound = inspect.signature(model.forward).bind_partial()
    bound.arguments.update(pytree.tree_map(without_values, dict(inputs)))
    before, first, *others = run_in_sections(model, (bound.args, bound.kwargs), cuts)
    return [before.flops + first.flops, *(section.flops for section in others)]


def text_of(stages: Stages) -> str:
    """A table of the stages; what passes each boundary; ties and output."""
    batch = ", ".join(f"{name} {what}" for name, what in stages.batch.items())
    lines = [f"{len(stages.stages)} stages of {stages.model}, for {batch}", ""]
    heads = ("stage", "modules", "parameters", "forward FLOPs", "reads from the batch")
    lines += _table([heads, *(_row(stage) for stage in stages.stages)], right=(2, 3))
    if stages.ties:
        lines.append("")
    for name, users in stages.ties.items():
        lines.append(f"* tied: {name}, in the stages {_listed(users)}")
    for stage in stages.stages[:-1]:
        lines += ["", f"stage {stage.index} -> {stage.index + 1}: {_size(stages.bytes_sent(stage.index))}"]
        lines += [f"  {line}" for line in _table([_passing(crossing) for crossing in stage.sent], right=(2,))]
    made = ", ".join(f"{name} (stage {stage})" for name, stage in stages.outputs.items())
    lines += ["", f"output: {made}"]
    lines += [f"note: {note}" for note in stages.notes]
    return "\n".join(lines)


def _row(stage: StageView) -> tuple[str, ...]:
    modules = stage.first if stage.first == stage.last else f"{stage.first} .. {stage.last}"
    return (
        str(stage.index),
        modules,
        f"{stage.parameters:,}{'*' if stage.tied else ' '}",
        "-" if stage.flops is None else f"{stage.flops:,}",
        ", ".join(stage.inputs) or "-",
    )


def _passing(crossing: Crossing) -> tuple[str, ...]:
    about = ["gradient" if crossing.requires_grad else "no gradient"]
    if crossing.is_relayed:
        about.append(f"relayed from stage {crossing.producer}")
    if crossing.consumers:
        about.append(f"for stage{'s' if len(crossing.consumers) > 1 else ''} {_listed(crossing.consumers)}")
    else:
        about.append("for the output")
    return crossing.name, f"{crossing.shape} {crossing.dtype}", _size(crossing.nbytes), ", ".join(about)


def _table(rows: Sequence[Sequence[str]], *, right: Sequence[int]) -> Iterator[str]:
    """Rows of one text a column, in columns of one width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            text.rjust(width) if column in right else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _listed(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last


def _size(nbytes: int) -> str:
    return f"{nbytes:,} bytes"
