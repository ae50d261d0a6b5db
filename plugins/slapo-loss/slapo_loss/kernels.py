"""Compute a chunk's log-sum-exp, and its gradient in place, by Triton kernels.

Each reads the logits once, where operations of torch would read and write copies of them in float32.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

_COLUMNS = 4096
"""Of a row, that a program reads at a time."""

_WARPS = 8


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _log_sum_exp(logits, shifts, log_sums, stride, classes, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    largest = tl.full([COLUMNS], -3.0e38, tl.float32)  # finite: rows may begin with minus infinity
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, classes, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        values = tl.load(logits + columns, mask=columns < classes, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(largest, values)
        total = total * tl.exp(largest - higher) + tl.exp(values - higher)
        largest = higher
    shift = tl.max(largest, 0)
    tl.store(shifts + row, shift)
    tl.store(log_sums + row, tl.log(tl.sum(total * tl.exp(largest - shift), 0)))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _to_gradient(  # type: ignore[no-untyped-def]
    logits,
    shifts,
    log_sums,
    labels,
    of_labels,
    uniforms,
    class_weights,
    stride,
    classes,
    COLUMNS: tl.constexpr,
    IS_SMOOTHED: tl.constexpr,
    IS_WEIGHTED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < classes
    places = logits + row * stride + columns
    values = tl.load(places, mask=inside, other=float("-inf")).to(tl.float32)
    found = tl.exp((values - tl.load(shifts + row)) - tl.load(log_sums + row))
    found -= tl.where(columns == tl.load(labels + row), tl.load(of_labels + row), 0.0)
    if IS_SMOOTHED:
        uniform = tl.load(uniforms + row)
        if IS_WEIGHTED:
            found -= uniform * tl.load(class_weights + columns, mask=inside, other=0.0)
        else:
            found -= uniform
    tl.store(places, found.to(logits.dtype.element_ty), mask=inside)


def log_sum_exp(logits: Tensor, shifts: Tensor, log_sums: Tensor) -> None:
    """Launch the kernel of `operators.log_sum_exp`, which writes into the last two."""
    with torch.cuda.device_of(logits):
        _log_sum_exp[(logits.shape[0],)](
            logits, shifts, log_sums, logits.stride(0), logits.shape[1], COLUMNS=_COLUMNS, num_warps=_WARPS
        )


def to_gradient(
    logits: Tensor,
    shifts: Tensor,
    log_sums: Tensor,
    labels: Tensor,
    of_labels: Tensor,
    uniforms: Tensor | None,
    class_weights: Tensor | None,
) -> None:
    """Launch the kernel of `operators.to_gradient`."""
    grid = (logits.shape[0], triton.cdiv(logits.shape[1], _COLUMNS))
    with torch.cuda.device_of(logits):
        _to_gradient[grid](
            logits,
            shifts,
            log_sums,
            labels,
            of_labels,
            of_labels if uniforms is None else uniforms,
            of_labels if class_weights is None else class_weights,
            logits.stride(0),
            logits.shape[1],
            COLUMNS=_COLUMNS,
            IS_SMOOTHED=uniforms is not None,
            IS_WEIGHTED=class_weights is not None,
            num_warps=_WARPS,
        )
