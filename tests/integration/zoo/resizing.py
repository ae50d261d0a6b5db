"""A batch at other sizes: another number of rows, and other lengths where the model takes them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.integration.zoo.subjects import call, copied

__all__ = ["at_other_sizes"]

_ROWS = (3, 1)


def at_other_sizes(model: nn.Module, batch: Any, multiple: int = 1) -> list[Any]:
    """``batch`` with three rows and with one, each with other lengths too where the reference model runs on that.

    Args:
        model: not changed.
        batch: positional arguments, or keyword ones; axis 0 of every tensor is the row.
        multiple: of which the number of tokens is one.
    """
    model = copied(model)
    return [found for rows in _ROWS for found in [_first_that_runs(model, batch, rows, multiple)] if found is not None]


def _first_that_runs(model: nn.Module, batch: Any, rows: int, multiple: int) -> Any:
    for candidate in _candidates(batch, rows, multiple):
        torch.manual_seed(5)
        try:
            for training in (True, False):
                call(model.train(training), copy.deepcopy(candidate))
        except Exception:  # noqa: BLE001 - the reference model does not take that size: the next one
            continue
        return candidate
    return None


def _candidates(batch: Any, rows: int, multiple: int) -> Iterator[Any]:
    """Every length another, only that of the numbers (ids), only that of the rest, only the number of rows."""
    shorter = rows == 3
    for ids, rest in ((True, True), (True, False), (False, True), (False, False)):
        for change in (_resized, _halved) if rest else (_resized,):
            yield _mapped(
                batch,
                lambda tensor, ids=ids, rest=rest, change=change: _rowed(
                    _id_length(tensor, shorter, multiple)
                    if ids and not tensor.is_floating_point()
                    else change(tensor, shorter)
                    if rest and tensor.is_floating_point()
                    else tensor,
                    rows,
                ),
            )


def _mapped(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, dict):
        return {name: change(value) if isinstance(value, Tensor) else value for name, value in batch.items()}
    return tuple(change(value) if isinstance(value, Tensor) else value for value in batch)


def _rowed(tensor: Tensor, rows: int) -> Tensor:
    if tensor.dim() == 0:
        return tensor
    taken = tensor[torch.arange(rows) % len(tensor)]
    return taken * 0.75 if tensor.is_floating_point() else taken.flip(0)


def _id_length(tensor: Tensor, shorter: bool, multiple: int) -> Tensor:
    """Five tokens fewer, or three fewer; or more, for a multiple."""
    if tensor.dim() != 2 or tensor.shape[1] <= 5:
        return tensor
    length = tensor.shape[1] - (5 if shorter else 3)
    return tensor[:, : max(length // multiple, 1) * multiple]


def _resized(tensor: Tensor, shorter: bool) -> Tensor:
    """A longer or shorter signal; an image of another format."""
    if tensor.dim() == 4:
        size = (tensor.shape[2] * 3 // 2, tensor.shape[3]) if shorter else (tensor.shape[2] * 2, tensor.shape[3] * 2)
        return F.interpolate(tensor, size)
    if tensor.dim() in (2, 3) and tensor.shape[1] > 4:
        return tensor[:, : tensor.shape[1] * (3 if shorter else 5) // 6]
    return tensor


def _halved(tensor: Tensor, shorter: bool) -> Tensor:
    """Along the last axis."""
    if tensor.dim() == 3 and tensor.shape[2] > 4:
        return tensor[..., : tensor.shape[2] // (2 if shorter else 4) * (1 if shorter else 3)]
    return tensor
