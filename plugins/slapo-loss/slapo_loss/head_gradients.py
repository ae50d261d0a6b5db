"""Sum the gradients of a head chunk by chunk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slapo_loss.head_chunks import ChunkedHead
from slapo_loss.private import add_product, product


class Sums:
    """Sum in a larger type than the result's, half of it in the result's memory.

    Args:
        like: the result: its shape, type and device.
        dtype: of the sums.
        block_bytes: of a block that is cast at a time.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype, block_bytes: int) -> None:
        self._found = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        self._parts, self._block_bytes = [self._found], block_bytes
        if dtype != like.dtype:
            rows, columns = like.shape
            half = rows * like.dtype.itemsize // dtype.itemsize
            memory = self._found.view(-1)[: half * columns * dtype.itemsize // like.dtype.itemsize]
            rest = torch.zeros((rows - half, columns), dtype=dtype, device=like.device)
            self._parts = [memory.view(dtype).view(half, columns), rest]

    def add(self, left: Tensor, right: Tensor) -> None:
        """Add ``left.T @ right`` to the first rows."""
        start = 0
        for part in self._parts:
            columns = left[:, start : start + part.shape[0]]
            add_product(part[: columns.shape[1]], columns, right, self._block_bytes)
            start += part.shape[0]

    def scaled(self, factor: Tensor | None, is_kept: bool) -> Tensor:
        """Return the sums in their final type, times a factor.

        Args:
            factor: a scalar; None: 1.
            is_kept: whether they are asked for again.
        """
        if len(self._parts) == 1 and not is_kept:
            return self._found if factor is None else self._found.mul_(_one_axis(factor))
        found, start = torch.empty_like(self._found) if is_kept else self._found, 0
        for part in self._parts:
            step = max(1, self._block_bytes // max(1, part.shape[1] * part.dtype.itemsize))
            for block in part.split(step):  # each ends before the next begins, in the same memory, too
                cast = block.to(found.dtype, copy=True) if factor is None else (block * factor).to(found.dtype)
                found[start : start + block.shape[0]] = cast
                start += block.shape[0]
        return found


def _one_axis(factor: Tensor) -> Tensor:
    """Give a scalar an axis on a GPU, so that it keeps its type in products."""
    return factor if factor.device.type == "cpu" else factor.reshape(1)


class Gradients:
    """Sum the gradients of hidden states, weight and bias, chunk by chunk."""

    def __init__(self, head: ChunkedHead, needs: Any) -> None:
        hidden, weight, bias = needs
        self._head, self.dtype = head, head.dtype
        given = head.weight.dtype
        is_one = head.hidden.shape[0] <= head.chunk and given != torch.float16  # unscaled sums may leave its range
        sums = given if is_one else torch.promote_types(given, torch.float32)
        self._hidden = torch.empty_like(head.hidden, memory_format=torch.contiguous_format) if hidden else None
        self._weight = Sums(head.weight, sums, head.block_bytes) if weight else None
        has_bias = bias and head.bias is not None
        self._bias = (
            torch.zeros(head.weight.shape[:1], dtype=head.dtype, device=head.weight.device) if has_bias else None
        )

    def add(self, part: slice, logits: Tensor, factors: Tensor | None) -> None:
        """Add a chunk's: the gradients of its logits are ``factors[:, None] * logits``."""
        head = self._head
        hidden, classes = head.hidden[part], head.classes
        of_rows = None if factors is None else factors[:, None]
        if self._weight is not None:
            self._weight.add(logits, hidden if of_rows is None else (hidden * of_rows).to(hidden.dtype))
        if self._bias is not None:
            ones = torch.ones_like(logits[:, :1]) if of_rows is None else of_rows.to(logits.dtype)
            add_product(self._bias[:classes, None], logits, ones, head.block_bytes)
        if self._hidden is not None:
            self._hidden[part] = product(logits, head.weight[:classes], of_rows)

    def scaled(self, factor: Tensor | None, is_kept: bool) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients, times a factor.

        Args:
            factor: a scalar; None: 1.
            is_kept: whether they are asked for again.
        """
        hidden, bias = self._hidden, self._bias
        if hidden is not None and factor is not None:
            of_all = _one_axis(factor)
            hidden = torch.mul(hidden, of_all, out=torch.empty_like(hidden)) if is_kept else hidden.mul_(of_all)
        if bias is not None:
            bias = (bias if factor is None else bias * factor).to(self._head.weight.dtype)
        return hidden, None if self._weight is None else self._weight.scaled(factor, is_kept), bias
