"""``fusion.rms_norm``: division by the root mean square, written out, and torch's own in its place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import slapo_core as slapo

__all__ = ["RmsNorm", "rms_norm"]

_CONSTANT = slapo.patterns.any_constant()


def rms_norm(
    x: Tensor,
    eps: float,
    weight: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    fine: torch.dtype | None = None,
) -> Tensor:
    """``F.rms_norm`` over the last axis for what the forms of ``fusion.rms_norm`` compute, cast where they cast.

    Args:
        x: (..., features).
        eps: added to the mean square.
        weight: what the normed values are multiplied by; of any shape that this takes.
        dtype: that the normed values are cast to before.
        fine: in which the mean square is computed, where it is not that of ``x``.
    """
    features = x.shape[-1:]
    one_type = (dtype is None or dtype == x.dtype) and (fine is None or fine == x.dtype)
    if one_type and weight is not None and weight.dtype == x.dtype and weight.shape == features:
        return F.rms_norm(x, features, weight, eps)
    normed = F.rms_norm(x if fine is None else x.to(fine), features, None, eps)
    if dtype is not None:
        normed = normed.to(dtype)
    return normed if weight is None else weight * normed


class RmsNorm(slapo.Pattern):
    """RMSNorm written out: weight * (x * rsqrt(mean(x**2) + eps)), over the last axis.

    The forms of LLaMA (normed in float32, cast back, then weighted), T5 (weighted in the type of the weight), Gemma and
    OLMo (weighted in float32), with the reciprocal root in any of its spellings, and with a weight or none. ``x`` is
    what enters the square, so a cast before it stays outside of the match, and ``weight`` is the factor as it stands:
    for Gemma, which multiplies by ``1 + weight``, that sum.

    The replacement casts where the model does: ``F.rms_norm`` with the weight where all is of one type, and without it,
    then the cast and the product, where not.

    Not found: a mean over other axes, groups of features, values that are centerd first (that is LayerNorm).
    """

    name = "fusion.rms_norm"
    replacement = staticmethod(rms_norm)

    def forms(self) -> Iterable[Any]:
        def rms_normed(x: Any, weight: Any, eps: Any = _CONSTANT, dtype: Any = _CONSTANT, fine: Any = _CONSTANT) -> Any:
            normed = _normed(x, eps, fine)
            return slapo.patterns.any_of(weight * normed.to(dtype), weight * normed, normed)

        yield rms_normed


def _normed(x: Any, eps: Any, fine: Any) -> Any:
    any_of = slapo.patterns.any_of
    source = any_of(x, x.to(fine))
    square = any_of(source.pow(2), source * source, source.square())
    mean = any_of(square.mean(-1, keepdim=True), square.mean(dim=-1, keepdim=True)) + eps
    return any_of(x * any_of(torch.rsqrt(mean), torch.pow(mean, -0.5)), x / torch.sqrt(mean))
