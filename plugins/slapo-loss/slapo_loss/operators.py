"""Declare the operators of a chunk's kernels, whose shapes are known where no kernel runs, e.g. on fake tensors."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("slapo_loss::log_sum_exp", mutates_args=(), schema="(Tensor logits) -> (Tensor, Tensor)")
def log_sum_exp(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each row, and the logarithm of the sum of ``exp(logits - largest)``.

    Args:
        logits: (tokens, classes) of at most 4 bytes each; the classes of a token lie beside each other.

    Returns:
        (tokens,) and (tokens,) in float32.
    """
    from slapo_loss import kernels  # with Triton

    shifts, log_sums = _rows_of(logits)
    kernels.log_sum_exp(logits, shifts, log_sums)
    return shifts, log_sums


@log_sum_exp.register_fake
def _(logits: Tensor) -> tuple[Tensor, Tensor]:
    return _rows_of(logits)


def _rows_of(logits: Tensor) -> tuple[Tensor, Tensor]:
    shifts = torch.empty(logits.shape[:1], dtype=torch.float32, device=logits.device)
    return shifts, torch.empty_like(shifts)


@torch.library.custom_op(
    "slapo_loss::to_gradient",
    mutates_args=("logits",),
    schema="(Tensor(a!) logits, Tensor shifts, Tensor log_sums, Tensor labels, Tensor of_labels, Tensor? uniforms, "
    "Tensor? class_weights) -> ()",
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
    """Turn logits into ``exp(logits - shifts - log_sums) - one_hot * of_labels - uniforms``, their gradient.

    Args:
        logits: (tokens, classes) of at most 4 bytes each; the classes of a token lie beside each other.
        shifts: (tokens,) in float32.
        log_sums: (tokens,) in float32.
        labels: (tokens,) int64, of the classes that are here.
        of_labels: (tokens,) in float32.
        uniforms: (tokens,) in float32, of label smoothing.
        class_weights: (classes,) in float32, by which ``uniforms`` are multiplied.
    """
    from slapo_loss import kernels  # with Triton

    kernels.to_gradient(logits, shifts, log_sums, labels, of_labels, uniforms, class_weights)


@to_gradient.register_fake
def _(*_: Tensor | None) -> None:
    return None
