"""A batch cut into micro-batches, so that gradients can be accumulated over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from slapo_core.errors import BuildError

__all__ = ["labels_left_out", "micro_batches"]

_LEFT_OUT = -100  # the label that torch's and transformers' losses leave out


def micro_batches(batch: Any, count: int) -> list[Any]:
    """Cut every tensor of a batch along its first axis into ``count`` pieces of one size.

    Args:
        batch: a mapping, a tuple or list, or one tensor. Tensors without axes and plain values go to every piece.
        count: 1 gives the batch itself.

    Raises:
        BuildError: the samples do not divide, tensors differ in their number, or something else than a tensor holds
            one value for each sample.
    """
    if count == 1:
        return [batch]
    leaves = list(_leaves("batch", batch))
    for place, value in leaves:
        if not (value is None or isinstance(value, (torch.Tensor, bool, int, float, str))):
            raise BuildError(
                f"accumulate={count} cannot cut {place}, a {type(value).__name__}: only tensors are cut into "
                "micro-batches",
                hint="give it as a tensor whose first axis counts the samples",
            )
    lengths = {place: len(value) for place, value in leaves if isinstance(value, torch.Tensor) and value.dim()}
    if not lengths:
        raise BuildError(f"accumulate={count} finds no tensor to cut in the batch", hint="accumulate=1")
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{place}: {length}" for place, length in lengths.items())
        raise BuildError(
            f"accumulate={count} cuts every tensor of the batch along its first axis, which must count the samples in "
            f"all of them (got {shown})",
            hint="expand() what all samples share, or make it a buffer of the model",
        )
    samples = next(iter(lengths.values()))
    if samples % count or not samples:
        raise BuildError(
            f"{samples} samples do not divide into accumulate={count} micro-batches of one size, whose losses would "
            "weigh alike",
            hint="DataLoader(..., drop_last=True), with a batch_size that is a multiple of it",
        )
    size = samples // count
    return [_piece(batch, number * size, size) for number in range(count)]


def labels_left_out(pieces: list[Any]) -> str | None:
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
                    "axes, divided by accumulate"
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


def _piece(value: Any, start: int, size: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value.narrow(0, start, size) if value.dim() else value
    if isinstance(value, Mapping):
        return {key: _piece(item, start, size) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [_piece(item, start, size) for item in value]
        if hasattr(value, "_fields"):  # a named tuple takes them one by one
            return type(value)(*items)
        return tuple(items) if isinstance(value, tuple) else items
    return value
