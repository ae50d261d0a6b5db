"""A batch cut into micro-batches, so that gradients can be accumulated over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from slapo_core.errors import BuildError

__all__ = ["labels_left_out", "micro_batches"]

_AXIS = ("first axis", "first axis, or the one that batch_axes names")
_LEFT_OUT = -100  # the label that torch's and transformers' losses leave out


def micro_batches(
    batch: Any,
    count: int,
    *,
    option: str = "accumulate",
    axes: Mapping[str | int, int | None] | None = None,
) -> list[Any]:
    """Cut every tensor of a batch along its first axis, or the one that is said, into ``count`` pieces of one size.

    Args:
        batch: a mapping, a tuple or list, or one tensor. Tensors without axes and plain values go to every piece.
        count: 1 gives the batch itself.
        option: that gives the number, for messages.
        axes: for a key or a place in the batch (0 for one tensor): the axis of its tensors that counts the samples;
            None: they go to every piece.

    Raises:
        BuildError: the samples do not divide, tensors differ in their number, or something else than a tensor holds
            one value for each sample.
    """
    if count == 1:
        return [batch]
    axes = axes or {}
    leaves = list(_leaves("batch", batch))
    for place, value in leaves:
        if not (value is None or isinstance(value, (torch.Tensor, bool, int, float, str))):
            raise BuildError(
                f"{option}={count} cannot cut {place}, a {type(value).__name__}: only tensors are cut into "
                "micro-batches",
                hint="give it as a tensor whose first axis counts the samples",
            )
    lengths = dict(_lengths(batch, axes))
    if not lengths:
        raise BuildError(f"{option}={count} finds no tensor to cut in the batch", hint=f"{option}=1")
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{place}: {length}" for place, length in lengths.items())
        raise BuildError(
            f"{option}={count} cuts every tensor of the batch along its {_AXIS[bool(axes)]}, which must count the "
            f"samples in all of them (got {shown})",
            hint="expand() what all samples share, or make it a buffer of the model"
            if option == "accumulate"
            else 'batch_axes={"bias": None, "x": 1}: no tensor of "bias" is cut, those of "x" along their second axis',
        )
    samples = next(iter(lengths.values()))
    if samples % count or not samples:
        raise BuildError(
            f"{samples} samples do not divide into {option}={count} micro-batches of one size, whose losses would "
            "weigh alike",
            hint="DataLoader(..., drop_last=True), with a batch_size that is a multiple of it",
        )
    size = samples // count
    return [_cut(batch, number * size, size, axes) for number in range(count)]


def labels_left_out(pieces: list[Any], *, option: str = "accumulate") -> str | None:
    """Why the mean of the pieces' losses may not be that of the batch; None where nothing speaks against it.

    A mean over labels weighs a piece by the labels that count in it; the gradients of pieces weigh alike.
    """
    for place, value in _leaves("batch", pieces[0]):
        if isinstance(value, torch.Tensor) and value.dim() and not value.is_floating_point() and not value.is_complex():
            others = [dict(_leaves("batch", piece))[place] for piece in pieces]
            counts = [int((other != _LEFT_OUT).sum()) for other in others]
            if len(set(counts)) > 1:
                return (
                    f"{place} has {', '.join(map(str, counts))} labels other than {_LEFT_OUT} in the micro-batches, "
                    "which weigh alike: the mean of their losses is not the mean over the labels of the batch; for "
                    "that, let loss= divide the sum over labels by a number that the batch gives as a tensor without "
                    f"axes, divided by {option}"
                )
    return None


def _leaves(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{place}[{key!r}]", item)
    elif isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            # Plain values further inside may be one for each sample; arguments are not.
            if place != "batch" and not isinstance(item, (torch.Tensor, Mapping, tuple, list)):
                yield place, value
                return
            yield from _leaves(f"{place}[{number}]", item)
    else:
        yield place, value


def _parts(batch: Any) -> Iterator[tuple[Any, str, Any]]:
    """The arguments in a batch: key or place, how messages name it, and the value."""
    if isinstance(batch, Mapping):
        yield from ((key, f"batch[{key!r}]", value) for key, value in batch.items())
    elif isinstance(batch, (tuple, list)):
        yield from ((number, f"batch[{number}]", value) for number, value in enumerate(batch))
    else:
        yield 0, "batch", batch


def _lengths(batch: Any, axes: Mapping[Any, int | None]) -> Iterator[tuple[str, int]]:
    for key, name, part in _parts(batch):
        axis = axes.get(key, 0)
        for place, value in _leaves(name, part):
            if isinstance(value, torch.Tensor) and value.dim() and axis is not None:
                if not -value.dim() <= axis < value.dim():
                    raise BuildError(
                        f"batch_axes names axis {axis} of {place}, which has {value.dim()} axes {tuple(value.shape)}",
                        hint=f"batch_axes={{{key!r}: {value.dim() - 1}}}",
                    )
                yield place, value.shape[axis]


def _cut(batch: Any, start: int, size: int, axes: Mapping[Any, int | None]) -> Any:
    """One piece of a batch."""
    pieces = {key: _piece(value, start, size, axes.get(key, 0)) for key, _, value in _parts(batch)}
    if isinstance(batch, Mapping):
        return pieces
    return _like(batch, list(pieces.values())) if isinstance(batch, (tuple, list)) else pieces[0]


def _piece(value: Any, start: int, size: int, axis: int | None) -> Any:
    if isinstance(value, torch.Tensor):
        return value.narrow(axis, start, size) if value.dim() and axis is not None else value
    if isinstance(value, Mapping):
        return {key: _piece(item, start, size, axis) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return _like(value, [_piece(item, start, size, axis) for item in value])
    return value


def _like(value: tuple[Any, ...] | list[Any], items: list[Any]) -> Any:
    if hasattr(value, "_fields"):  # a named tuple takes them one by one
        return type(value)(*items)
    return tuple(items) if isinstance(value, tuple) else items
