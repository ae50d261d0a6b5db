"""``fusion.sdpa``: attention written out, and torch's own in its place."""

from __future__ import annotations

import math
from collections.abc import Iterable
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
    early_mask: Tensor | None = None,
    hidden: Tensor | None = None,
    visible: Tensor | None = None,
    fill: float = -math.inf,
    scale: float = 1.0,
    divisor: float = 1.0,
    factor: float | Tensor = 1.0,
    ratio: float | Tensor = 1.0,
    p: float = 0.0,
    training: bool = True,
) -> Tensor:
    """``F.scaled_dot_product_attention`` for what the forms of ``fusion.sdpa`` compute.

    Args:
        query: (..., queries, size of a head).
        key: (..., size of a head, keys): transposed, as the product with the query takes it.
        value: (..., keys, size of a value).
        mask: added to the scaled scores.
        second_mask: added too.
        early_mask: added before the scores are scaled.
        hidden: boolean; where it is true the scores become ``fill``.
        visible: boolean; where it is false they do.
        fill: a low number. With one above -10,000, which does not hide, the weights are computed as the model does.
        scale: the scores are multiplied by it.
        divisor: the scores are divided by it.
        factor: the same as ``scale``, computed by the model: a number, or a tensor such as each head's own.
        ratio: the same as ``divisor``.
        p: how likely a weight is dropped.
        training: whether any is.
    """
    measure = scale / divisor * factor / ratio
    number = 1.0 if isinstance(measure, Tensor) else float(measure)
    dropped = p if training else 0.0
    if isinstance(measure, Tensor):
        if measure.shape[-2:].numel() != 1:  # another scale for each key: not what torch's function has
            return _as_written(query, key, value, measure, mask, hidden, visible, fill, dropped)
        query = query * measure
    if hidden is not None:
        visible = ~hidden
    if visible is not None:
        if fill > _LOW:
            return _as_written(query, key, value, number, mask, None, visible, fill, dropped)
        # Added, not boolean: a query from which everything is hidden weighs all values alike, as in the model.
        low = torch.zeros((), dtype=query.dtype, device=query.device).expand(visible.shape)
        mask = low.masked_fill(~visible, torch.finfo(query.dtype).min)
    if second_mask is not None:
        mask = second_mask if mask is None else mask + second_mask
    if early_mask is not None:
        mask = early_mask * number
    if mask is not None and mask.dtype not in (query.dtype, torch.float32):
        mask = mask.to(query.dtype)
    out = F.scaled_dot_product_attention(
        query,
        key.transpose(-2, -1),
        value.to(query.dtype),  # some models compute the scores in a finer type
        attn_mask=mask,
        dropout_p=dropped,
        scale=number,
    )
    return out.to(value.dtype)


def _as_written(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    measure: float | Tensor,
    mask: Tensor | None,
    hidden: Tensor | None,
    visible: Tensor | None,
    fill: float,
    dropped: float,
) -> Tensor:
    """What the model computes, where torch's function has no arguments for it."""
    scores = query @ key * measure
    if mask is not None:
        scores = scores + mask
    if visible is not None:
        hidden = ~visible
    if hidden is not None:
        scores = scores.masked_fill(hidden, fill)
    return F.dropout(scores.softmax(-1).to(value.dtype), dropped) @ value


class ScaledDotProductAttention(slapo.Pattern):
    """Attention written out: softmax(query @ key * scale + mask) @ value.

    Scale, mask and dropout may be absent; the scale is a constant or computed, multiplied with or divided by. A mask is
    added (one, or a bias and a mask; after the scale or before), or a constant is filled in (``masked_fill`` where it
    is true, ``torch.where`` where it is false). The softmax may be computed in float32 and cast back. ``key`` is the
    transposed one, as it stands in the product; keys repeated for grouped queries are repeated outside of the match.

    Not found: other operations between the product and the softmax (a soft cap, sinks) or behind it (a head mask),
    since torch's function does not have them; and a softmax over another axis.

    Where the traced module also returns the attention weights, and does not use them, they are None behind the
    replacement, as they are with torch's ``need_weights=False``; not where the root returns them.
    """

    name = "fusion.sdpa"
    replacement = staticmethod(attention)
    results_only = True

    def forms(self) -> Iterable[Any]:
        def scaled_dot_product_attention(
            query: Any,
            key: Any,
            value: Any,
            mask: Any,
            second_mask: Any,
            early_mask: Any,
            hidden: Any,
            visible: Any,
            factor: Any,
            ratio: Any,
            fill: Any = _CONSTANT,
            scale: Any = _CONSTANT,
            divisor: Any = _CONSTANT,
            p: Any = _CONSTANT,
            training: Any = _CONSTANT,
        ) -> Any:
            any_of = slapo.patterns.any_of
            scores = torch.matmul(query, key)
            multiplied, divided = scores * scale, scores / divisor
            scaled = any_of(multiplied, divided, scores)
            measured = any_of(scores * factor, scores / ratio)
            ready = any_of(
                scaled + mask + second_mask,
                scaled + mask,
                scaled.masked_fill(hidden, fill),
                torch.where(visible, any_of(multiplied, divided), fill),
                scaled,
                measured + mask,
                measured.masked_fill(hidden, fill),
                measured,
                scores.div_(divisor) + mask,
                scores.div_(divisor),
                (scores + early_mask) / divisor,
                (scores + early_mask) * scale,
            )
            weights = _weights(ready, p, training)

            batches = torch.bmm(query, key)
            batches = any_of(batches * scale, batches / divisor, batches)
            batch_weights = F.softmax(any_of(batches + mask, batches), dim=-1)
            batch_weights = slapo.patterns.optional(F.dropout, batch_weights, p, training)
            return any_of(torch.matmul(weights, value), torch.bmm(batch_weights, value))

        yield scaled_dot_product_attention


def _weights(scores: Any, p: Any, training: Any) -> Any:
    """Softmax, cast and dropout: not every combination of them, for each costs time in every search."""

    def dropped(weights: Any) -> Any:
        return F.dropout(weights, p, training)

    plain = F.softmax(scores, dim=-1)
    in_float32 = F.softmax(scores, dim=-1, dtype=torch.float32)
    cast_before = F.softmax(scores.to(torch.float32), dim=-1)
    return slapo.patterns.any_of(
        dropped(plain),
        dropped(plain.to(_CONSTANT)),
        dropped(plain.type(_CONSTANT)),
        dropped(plain).to(_CONSTANT),
        plain,
        dropped(in_float32.to(_CONSTANT)),
        in_float32.to(_CONSTANT),
        in_float32,
        dropped(cast_before.to(_CONSTANT)),
        cast_before.to(_CONSTANT),
    )
