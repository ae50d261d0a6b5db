"""``fusion.sdpa``: attention written out, and torch's own in its place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import slapo_core as slapo

__all__ = ["ScaledDotProductAttention", "attention"]

_CONSTANT = slapo.patterns.any_constant()
_LOW = -1e4
"""A score as low as this, or lower, gets a weight of 0 wherever another key is visible."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    second_mask: Tensor | None = None,
    hidden: Tensor | None = None,
    visible: Tensor | None = None,
    fill: float = -math.inf,
    scale: float | None = None,
    divisor: float | None = None,
    p: float = 0.0,
    training: bool = True,
) -> Tensor:
    """``F.scaled_dot_product_attention`` for what the forms of ``fusion.sdpa`` compute.

    Args:
        query: (..., queries, size of a head).
        key: (..., size of a head, keys): transposed, as the product with the query takes it.
        value: (..., keys, size of a value).
        mask: added to the scores.
        second_mask: added too.
        hidden: boolean; where it is true the scores become ``fill``.
        visible: boolean; where it is false they do.
        fill: a low number. With one above -10,000, which does not hide, the weights are computed as the model does.
        scale: the scores are multiplied by it.
        divisor: the scores are divided by it.
        p: how likely a weight is dropped.
        training: whether any is.
    """
    factor = (1.0 if scale is None else scale) / (1.0 if divisor is None else divisor)
    dropped = p if training else 0.0
    if hidden is not None:
        visible = ~hidden
    if visible is not None:
        if fill > _LOW:
            scores = torch.where(visible, query @ key * factor, fill)
            return F.dropout(scores.softmax(-1).to(value.dtype), dropped) @ value
        # Added, not boolean: a query from which everything is hidden weighs all values alike, as in the model.
        mask = torch.zeros((), dtype=query.dtype, device=query.device).expand(visible.shape)
        mask = mask.masked_fill(~visible, torch.finfo(query.dtype).min)
    if second_mask is not None:
        mask = second_mask if mask is None else mask + second_mask
    if mask is not None and mask.dtype not in (query.dtype, torch.float32):
        mask = mask.to(query.dtype)
    out = F.scaled_dot_product_attention(
        query,
        key.transpose(-2, -1),
        value.to(query.dtype),  # some models compute the scores in a finer type
        attn_mask=mask,
        dropout_p=dropped,
        scale=factor,
    )
    return out.to(value.dtype)


class ScaledDotProductAttention(slapo.Pattern):
    """Attention written out: softmax(query @ key * scale + mask) @ value.

    Scale, mask and dropout may be absent; the scale is a constant, multiplied with or divided by. A mask is added
    (one, or a bias and a mask), or a constant is filled in (``masked_fill`` where it is true, ``torch.where`` where it is
    false). The softmax may be computed in float32 and cast back. ``key`` is the transposed one, as it stands in the
    product; keys repeated for grouped queries are repeated outside of the match.

    Not found: other operations between the product and the softmax (a soft cap, sinks, a head's own scale as a tensor)
    or behind it (a head mask), since torch's function does not have them; and a softmax over another axis.

    Where a model returns the attention weights as well, they are a second output of the match, and nothing can replace
    it: trace the module around it that does not use them, with ``flatten=True``.
    """

    name = "fusion.sdpa"
    replacement = staticmethod(attention)

    def forms(self) -> Iterable[Any]:
        yield _form(torch.matmul, lambda scores: F.softmax(scores, dim=-1))
        yield _form(torch.matmul, lambda scores: F.softmax(scores, dim=-1, dtype=torch.float32))
        yield _form(torch.matmul, lambda scores: F.softmax(scores.to(torch.float32), dim=-1))
        yield _form(torch.bmm, lambda scores: F.softmax(scores, dim=-1))


def _form(product: Callable[..., Any], softmax: Callable[..., Any]) -> Callable[..., Any]:
    """Attention with one product of matrices and one softmax."""
    any_of, optional = slapo.patterns.any_of, slapo.patterns.optional

    def scaled_dot_product_attention(
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        second_mask: Any,
        hidden: Any,
        visible: Any,
        fill: Any = _CONSTANT,
        scale: Any = _CONSTANT,
        divisor: Any = _CONSTANT,
        p: Any = _CONSTANT,
        training: Any = _CONSTANT,
    ) -> Any:
        scores = product(query, key)
        scores = any_of(scores * scale, scores / divisor, scores)
        scores = any_of(
            scores + mask + second_mask,
            scores + mask,
            scores.masked_fill(hidden, fill),
            torch.where(visible, scores, fill),
            scores,
        )
        weights = softmax(scores)
        weights = any_of(weights.to(_CONSTANT), weights.type(_CONSTANT), weights)
        weights = optional(F.dropout, weights, p, training)
        return product(weights, value)

    return scaled_dot_product_attention
