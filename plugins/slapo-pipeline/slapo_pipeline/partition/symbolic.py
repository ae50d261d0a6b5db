"""How the sizes of values depend on the number of samples: found by making the stages for other numbers of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from slapo_core import TraceError
from slapo_core.spec.pipeline import Extent, Partition
from slapo_core.tracing import children, is_plain, rebuild


def with_symbolic_shapes(
    partition: Partition,
    inputs: Mapping[str, Any],
    batch_axes: Mapping[str, int | None],
    ask: Callable[[Mapping[str, Any]], Partition | None],
) -> Partition:
    """The same stages, with the shapes of their values as they depend on the number of samples.

    Stages are made for twice and three times as many samples; a size that does not grow evenly stays unknown, and all
    of them do where the model takes another way for other batches. It costs two more recordings.

    Args:
        partition: made for ``inputs``.
        inputs: by parameter of the model's forward.
        batch_axes: as the hook `slapo_partition` says.
        ask: makes the stages for other inputs.
    """
    samples = _samples(inputs, batch_axes)
    if samples is None:
        return partition
    others = []
    for times in (2, 3):
        try:
            other = ask({name: _resized(value, batch_axes.get(name, 0), times) for name, value in inputs.items()})
        except TraceError:
            return partition  # another number of samples takes another way
        if other is None or set(other.values) != set(partition.values):
            return partition
        others.append(other)
    values = {}
    for name, value in partition.values.items():
        shapes = [value.shape, *(other.values[name].shape for other in others)]
        extents = None
        if len({len(shape) for shape in shapes}) == 1:
            extents = tuple(_extent(sizes, samples) for sizes in zip(*shapes, strict=True))
        known = extents is not None and None not in extents
        values[name] = replace(value, symbolic_shape=extents if known else None)  # type: ignore[arg-type]
    return replace(partition, values=values)


def _samples(inputs: Mapping[str, Any], batch_axes: Mapping[str, int | None]) -> int | None:
    """How many samples the inputs have; None if that is not the same for all."""
    counts = {
        tensor.shape[axis]
        for name, value in inputs.items()
        for axis in [batch_axes.get(name, 0)]
        for tensor in _tensors(value)
        if axis is not None and tensor.dim() > axis
    }
    return counts.pop() if len(counts) == 1 else None


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [] if is_plain(value) else [tensor for _, _, part in children(value) or () for tensor in _tensors(part)]


def _resized(value: Any, axis: int | None, times: int) -> Any:
    """Like ``value``, with tensors without values for so many times the samples."""
    if axis is None or is_plain(value):
        return value
    if isinstance(value, torch.Tensor):
        if value.dim() <= axis:
            return value
        shape = list(value.shape)
        shape[axis] *= times
        return torch.empty(shape, dtype=value.dtype, device="meta", requires_grad=value.requires_grad)
    parts = children(value)
    return value if parts is None else rebuild(value, [_resized(part, axis, times) for _, _, part in list(parts)])


def _extent(sizes: tuple[int, ...], samples: int) -> int | Extent | None:
    """A size for as many, twice and three times as many samples."""
    one, two, three = sizes
    if one == two == three:
        return one
    if two - one != three - two or (two - one) % samples:
        return None
    per_sample = (two - one) // samples
    return Extent(per_sample, one - per_sample * samples)
