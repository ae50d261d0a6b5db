"""Whether what a plugin answered about stages has the types that `slapo_core.spec.pipeline` says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from slapo_core.spec.pipeline import Extent, Liveness, Output, Partition, Stage, StageModule, Tie, Value

__all__ = ["liveness_forms", "partition_forms"]


def partition_forms(partition: Any) -> Iterator[str]:
    """What in an answer to `slapo_partition` is of another type than it must be, or says nothing; in words."""
    if not isinstance(partition, Partition):
        yield f"it is a {type(partition).__name__}, not a Partition"
        return
    if not _all(partition.stages, Stage) or not _all(partition.ties, Tie):
        yield "stages and ties must be tuples of Stage and of Tie"
        return
    if len(partition.stages) < 2:
        yield "it has fewer than two stages: None is the answer for a model that is not cut"
    for stage in partition.stages:
        yield from _of_stage(stage)
    if len({id(stage.module) for stage in partition.stages}) < len(partition.stages):
        yield "two stages have one module"
    if not isinstance(partition.values, Mapping):
        yield f"values must be a mapping (got a {type(partition.values).__name__})"
        return
    for name, value in partition.values.items():
        yield from _of_value(name, value)
    for tie in partition.ties:
        if not isinstance(tie.name, str) or not _all(tie.stages, int) or len(tie.stages) < 2:
            yield f"a tie must have a name and the numbers of two stages or more (got {tie})"
    output = partition.output
    if not isinstance(output, Output) or not _names(output.pieces) or not callable(output.assemble):
        yield "the output must be an Output with names of its pieces and a function that puts them together"


def liveness_forms(liveness: Any) -> Iterator[str]:
    """As :func:`partition_forms`, of an answer to `slapo_liveness`."""
    if not isinstance(liveness, Liveness):
        yield f"it is a {type(liveness).__name__}, not a Liveness"
    elif not isinstance(liveness.boundaries, tuple) or not all(
        isinstance(boundary, tuple) and all(isinstance(name, str) for name in boundary)
        for boundary in liveness.boundaries
    ):
        yield "boundaries must be a tuple of tuples of names"


def _of_stage(stage: Stage) -> Iterator[str]:
    if not isinstance(stage.module, StageModule):
        yield f"the module of stage {stage.index} is a {type(stage.module).__name__}, not a StageModule"
    for what in ("inputs", "uses", "makes"):
        if not _names(getattr(stage, what)):
            yield f"{what} of stage {stage.index} must be a tuple of different names (got {getattr(stage, what)!r})"


def _of_value(name: Any, value: Any) -> Iterator[str]:
    if not isinstance(value, Value) or value.name != name:
        yield f"what is said about '{name}' must be a Value of that name"
        return
    if not isinstance(value.dtype, torch.dtype) or not _all(value.shape, int) or not _all(value.consumers, int):
        yield f"shape, dtype and consumers of '{name}' must be two tuples of numbers and a torch.dtype"
        return
    if value.requires_grad and not (value.dtype.is_floating_point or value.dtype.is_complex):
        yield f"'{name}' of {value.dtype} is said to carry a gradient"
    if value.symbolic_shape is not None:
        yield from _of_symbolic_shape(value, value.symbolic_shape)


def _of_symbolic_shape(value: Value, symbolic: Any) -> Iterator[str]:
    """Whether there is a number of samples for which it is the shape."""
    if not isinstance(symbolic, tuple) or len(symbolic) != len(value.shape):
        yield f"'{value.name}' has the shape {value.shape}, and another number of axes with the batch left open"
        return
    samples: set[int] = set()
    for size, extent in zip(value.shape, symbolic, strict=True):
        if not isinstance(extent, Extent):
            fits = extent == size
        elif extent.per_sample:
            number, rest = divmod(size - extent.constant, extent.per_sample)
            samples.add(number)
            fits = rest == 0 and number >= 0
        else:
            fits = extent.constant == size
        if not fits:
            yield f"an axis of '{value.name}' has {size} elements, which is not {extent}"
    if len(samples) > 1:
        numbers = " and ".join(map(str, sorted(samples)))
        yield f"the axes of '{value.name}' {value.shape} stand for {numbers} samples at once"


def _all(items: Any, kind: type) -> bool:
    return isinstance(items, tuple) and all(isinstance(item, kind) for item in items)


def _names(items: Any) -> bool:
    return _all(items, str) and len(set(items)) == len(items)
