"""Floating-point operations of what runs: torch's formulas, and those of products that torch leaves out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from slapo_core.private import flop_formulas

__all__ = ["FlopTracker"]

Formula = Callable[..., int]
"""The arguments of an operation, and its result as ``out_val`` -> how many; multiplying and adding is two."""

aten = torch.ops.aten


class FlopTracker:
    """Counts what products of a step do, recomputation included; an observer.

    Only products count, as for torch's ``FlopCounterMode``: whatever is done element by element takes its time from
    memory.

    Attributes:
        total: of the step that began last.
        last: of the operation that ran last.
    """

    def __init__(self) -> None:
        self.total = self.last = 0
        self._formulas: dict[Any, Formula | None] = {}
        self._packets: dict[Any, Formula] = {**flop_formulas(), **_LEFT_OUT}

    def begin(self) -> None:
        """Of a training step."""
        self.total = 0

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operation ran."""
        try:
            formula = self._formulas[func]
        except KeyError:
            formula = self._formulas[func] = self._packets.get(getattr(func, "_overloadpacket", func))
        if formula is None:
            self.last = 0
        else:
            self.last = formula(*args, **kwargs, out_val=result)
            self.total += self.last


def _product(a: Sequence[int], b: Sequence[int]) -> int:
    """Of matrices, or batches of them; one that is cut in groups counts as the whole.

    Args:
        a: shape ``(..., m, k)``.
        b: shape ``(..., k, n)``.
    """
    batch = a[0] if len(a) == 3 and len(b) == 3 else 1
    return 2 * batch * a[-2] * a[-1] * b[-1]


def _matrix(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> int:
    return _product(a.shape, b.shape)


def _added_matrix(_: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *__: Any, **___: Any) -> int:
    return _product(a.shape, b.shape)


def _vector(a: torch.Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel()


def _added_vector(_: torch.Tensor, a: torch.Tensor, *__: Any, **___: Any) -> int:
    return 2 * a.numel()


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    """Scores, and the sum of values; nothing is left out where attention is causal, as torch's formulas do."""
    batch, heads, length, size = query.shape
    return 2 * batch * heads * length * key.shape[-2] * (size + value.shape[-1])


def _attention_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    """Scores again; gradients of the scores and the values; those of queries and keys."""
    batch, heads, length, size = query.shape
    return 2 * batch * heads * length * key.shape[-2] * (3 * size + 2 * value.shape[-1])


def _convolution_backward(
    gradient: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Sequence[bool],
    **_: Any,
) -> int:
    """As often as the forward as there are gradients; torch's formula counts groups as if there were none."""
    places = (input if transposed else gradient).shape[2:]
    forward = 2 * gradient.shape[0] * math.prod(places) * weight.numel()
    return forward * (int(output_mask[0]) + int(output_mask[1]))


_LEFT_OUT: dict[Any, Formula] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._scaled_dot_product_fused_attention_overrideable: _attention,
    aten._scaled_dot_product_fused_attention_overrideable_backward: _attention_backward,
    aten._grouped_mm: _matrix,
    aten._scaled_grouped_mm: _matrix,
    aten._int_mm: _matrix,
    aten._addmm_activation: _added_matrix,
    aten.addbmm: _added_matrix,
    aten.mv: _vector,
    aten.addmv: _added_vector,
    aten.dot: _vector,
    aten.vdot: _vector,
    aten.addr: lambda _, a, b, *__, **___: 2 * a.numel() * b.numel(),
    aten.convolution_backward: _convolution_backward,
}
