"""Ready patterns: operations that models write out, as transformers and plain PyTorch code do.

``sch.find("fusion.sdpa")`` uses one by its name; ``slapo patterns list`` lists them, ``slapo patterns show
fusion.sdpa`` shows one with its alternatives. A pattern finds nothing inside of a module that is a call in the graph:
trace with ``flatten=True``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import slapo_core as slapo

# ``fusion.gelu``, ``fusion.gelu_tanh``, ``fusion.bias_gelu``: the Gaussian error linear unit, written out or not.

_ROOT = math.sqrt(2.0)
_FACTOR = math.sqrt(2.0 / math.pi)
_SHORTENED = 0.7978845608
"""The factor of transformers' FastGELU, whose last digit in float64 differs from torch's."""


def exact(x: Any) -> Any:
    """Write GELU by the error function, as transformers' ``gelu_python`` does."""
    any_of = slapo.patterns.any_of
    erf = torch.erf(any_of(x / _ROOT, x * (1 / _ROOT), x * math.sqrt(0.5)))
    return _half_of(x, 1.0 + erf)


def tanh_approximation(x: Any) -> Any:
    """Write GELU by the hyperbolic tangent, as ``gelu_new``, ``gelu_fast`` and ``gelu_accurate`` of transformers do.

    OpenAI's GPT-2, minGPT and nanoGPT write the first of them.
    """
    any_of = slapo.patterns.any_of
    cube = any_of(torch.pow(x, 3.0), x * x * x)
    square = 0.044715 * x * x
    tanh = torch.tanh(
        any_of(
            *(factor * (x + 0.044715 * cube) for factor in (_FACTOR, _SHORTENED)),
            *(x * factor * (1.0 + square) for factor in (_SHORTENED, _FACTOR)),
        )
    )
    return _half_of(x, 1.0 + tanh)


def quick(x: Any) -> Any:
    """Write CLIP's approximation of GELU, by a sigmoid."""
    return x * torch.sigmoid(1.702 * x)


def _half_of(x: Any, factor: Any) -> Any:
    return slapo.patterns.any_of(0.5 * x * factor, x * (0.5 * factor), 0.5 * (x * factor))


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


class Gelu(slapo.Pattern):
    """GELU by the error function, written out: x * 0.5 * (1 + erf(x / sqrt(2))).

    ``F.gelu`` is one operation that keeps one tensor for its backward, in the place of five.
    """

    name = "fusion.gelu"
    replacement = staticmethod(_gelu)

    def alternatives(self) -> Iterable[Any]:
        yield lambda x: exact(x)


class GeluTanh(slapo.Pattern):
    """GELU by the hyperbolic tangent, written out: 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))).

    transformers' ``gelu_new``, ``gelu_fast``, ``gelu_accurate`` and ``gelu_python_tanh``, traced with ``flatten=True``.
    Other constants are another function and not found.
    """

    name = "fusion.gelu_tanh"
    replacement = staticmethod(_gelu_tanh)

    def alternatives(self) -> Iterable[Any]:
        yield lambda x: tanh_approximation(x)


class BiasGelu(slapo.Pattern):
    """GELU of a sum with a bias: F.gelu(x + bias).

    Where the sum stands by itself, as behind ``decompose()``, or in ``F.linear(x, weight, bias)``, which then is a part
    of the match. The activation is torch's, exact or by tanh, or either of them written out, or ``quick_gelu``.
    """

    name = "fusion.bias_gelu"

    def alternatives(self) -> Iterable[Any]:
        yield lambda x, weight, bias: _any_gelu(slapo.patterns.any_of(x + bias, F.linear(x, weight, bias)))


def _any_gelu(x: Any) -> Any:
    return slapo.patterns.any_of(F.gelu(x), F.gelu(x, approximate="tanh"), exact(x), tanh_approximation(x), quick(x))


# ``fusion.swiglu`` and ``fusion.swiglu_projections``: the gated unit of LLaMA's MLP.


class SwiGlu(slapo.Pattern):
    """SwiGLU without its projections: F.silu(gate) * up.

    ``gate`` and ``up`` are any two values: of two layers, or the halves of one. Written out, SiLU is
    ``gate * torch.sigmoid(gate)``. Gates with another activation (GELU, sigmoid) are not found.
    """

    name = "fusion.swiglu"

    def alternatives(self) -> Iterable[Any]:
        yield lambda gate, up: _silu(gate) * up


class SwiGluProjections(slapo.Pattern):
    """SwiGLU with its projections: F.silu(gate_layer(x)) * up_layer(x).

    Both are ``nn.Linear`` or ``F.linear``, with or without a bias.
    """

    name = "fusion.swiglu_projections"

    def alternatives(self) -> Iterable[Any]:
        def swiglu(x: Any, gate_weight: Any, gate_bias: Any, up_weight: Any, up_bias: Any) -> Any:
            any_of = slapo.patterns.any_of
            gate = any_of(F.linear(x, gate_weight), F.linear(x, gate_weight, gate_bias))
            return _silu(gate) * any_of(F.linear(x, up_weight), F.linear(x, up_weight, up_bias))

        yield swiglu


def _silu(gate: Any) -> Any:
    return slapo.patterns.any_of(F.silu(gate), gate * torch.sigmoid(gate))


# ``fusion.rms_norm``: division by the root mean square, written out, and torch's own in its place.

_CONSTANT = slapo.patterns.any_constant()


def rms_norm(
    x: Tensor,
    eps: float,
    weight: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    fine: torch.dtype | None = None,
) -> Tensor:
    """Compute matches of ``fusion.rms_norm`` by ``F.rms_norm`` over the last axis, with their casts.

    Args:
        x: (..., features).
        eps: added to the mean square.
        weight: factor of the normed values, of any shape that broadcasts.
        dtype: of the normed values before the product.
        fine: dtype of the mean square, if it differs from that of ``x``.
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

    As LLaMA (normed in float32, cast back, then weighted), T5 (weighted in the type of the weight), Gemma and
    OLMo (weighted in float32) write it, with the reciprocal root in any spelling, with a weight or without. ``x``
    enters the square, so a cast before it stays outside of the match, and ``weight`` is the factor of the normed
    values: for Gemma, the sum ``1 + weight``.

    The replacement casts where the model does: ``F.rms_norm`` with the weight where all is of one type, and without it,
    then the cast and the product, where not.

    Not found: a mean over other axes, groups of features, values that are centered first (that is LayerNorm).
    """

    name = "fusion.rms_norm"
    replacement = staticmethod(rms_norm)

    def alternatives(self) -> Iterable[Any]:
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


# ``fusion.bias_dropout_add_norm``: the operations between two halves of a transformer layer.


class BiasDropoutAddNorm(slapo.Pattern):
    """Bias, dropout, residual and LayerNorm: F.layer_norm(F.dropout(x + bias) + residual).

    The bias is found where its sum stands by itself before a dropout, as behind ``decompose()``; otherwise ``x`` has it
    already. Dropout may be absent. The sum may be made two-dimensional before the norm, as in OPT. Where the sum is
    used behind the norm too, as in layers that begin with their norm, it is a second output of the match.
    """

    name = "fusion.bias_dropout_add_norm"

    def alternatives(self) -> Iterable[Any]:
        def bias_dropout_add_norm(
            x: Any,
            bias: Any,
            residual: Any,
            weight: Any,
            norm_bias: Any,
            shape: Any = _CONSTANT,
            p: Any = _CONSTANT,
            training: Any = _CONSTANT,
            eps: Any = _CONSTANT,
        ) -> Any:
            any_of = slapo.patterns.any_of
            dropped = any_of(F.dropout(x + bias, p, training), F.dropout(x, p, training), x)
            summed = dropped + residual
            return any_of(
                F.layer_norm(summed, shape, weight, norm_bias, eps),
                F.layer_norm(summed.reshape(-1, summed.size(-1)), shape, weight, norm_bias, eps),
                F.layer_norm(summed, shape, weight, None, eps),
                F.layer_norm(summed, shape, None, None, eps),
            )

        yield bias_dropout_add_norm


# ``fusion.qkv``: the three projections of an attention.


class Qkv(slapo.Pattern):
    """Three linear layers of one value: query, key and value, in the order of their calls.

    Each with a bias or without. The match has three outputs. ``merge`` makes one projection of them, by their paths:
    ``layer.merge(("self.query", "self.key", "self.value"))``.
    """

    name = "fusion.qkv"

    def alternatives(self) -> Iterable[Any]:
        def projections(
            x: Any, query: Any, query_bias: Any, key: Any, key_bias: Any, value: Any, value_bias: Any
        ) -> Any:
            any_of = slapo.patterns.any_of
            return (
                any_of(F.linear(x, query, query_bias), F.linear(x, query)),
                any_of(F.linear(x, key, key_bias), F.linear(x, key)),
                any_of(F.linear(x, value, value_bias), F.linear(x, value)),
            )

        yield projections


# ``fusion.rotary``: rotary position embedding of queries or keys.


class Rotary(slapo.Pattern):
    """Rotary embedding of one tensor: x * cos + rotate_half(x) * sin.

    Halves (LLaMA, GPT-NeoX), where ``rotate_half(x)`` is ``torch.cat((-x2, x1), dim=-1)`` of the two halves of the last
    axis, or neighbors (GPT-J, Cohere, GLM), where it is ``torch.stack((-x2, x1), dim=-1).flatten(-2)`` of every other
    element. Queries and keys are a match each. Where only a part of each head is rotated, ``x`` is that part. The
    middle of a head is read outside of the match, wherever the model computes it.

    Not found: rotations by complex numbers, and in the other direction (``torch.cat((x2, -x1), dim=-1)``).
    """

    name = "fusion.rotary"

    def alternatives(self) -> Iterable[Any]:
        def rotated(x: Any, cos: Any, sin: Any, first: Any, second: Any) -> Any:
            any_of = slapo.patterns.any_of
            source = any_of(x, x.to(torch.float32))
            turned = any_of(
                torch.cat((-source[..., second:], source[..., :first]), dim=-1),
                torch.stack((-source[..., 1::2], any_of(source[..., 0::2], source[..., ::2])), dim=-1).flatten(-2),
                torch.stack((-source[:, :, :, 1::2], source[:, :, :, ::2]), dim=-1).flatten(-2),
            )
            return x * cos + any_of(turned, turned.to(torch.float32)) * sin

        yield rotated


# ``fusion.sdpa``: attention written out, and torch's own in its place.

LOW = -1e4
"""A score as low as this, or lower, gets a weight of 0 wherever another key is visible."""


WRITTEN_OUT = (
    'models of transformers write attention out with attn_implementation="eager"; a ready schedule leaves it as it is '
    "with kernels=False"
)
"""How to make a model whose attention matches."""


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
    """Compute matches of ``fusion.sdpa`` by ``F.scaled_dot_product_attention``.

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
        p: the probability of dropping a weight.
        training: whether to drop.
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
        if fill > LOW:
            return _as_written(query, key, value, number, mask, None, visible, fill, dropped)
        # Added, not boolean: a query from which everything is hidden weighs all values alike, as in the model.
        low = torch.zeros((), dtype=query.dtype, device=query.device).expand(visible.shape)
        mask = low.masked_fill(~visible, torch.finfo(query.dtype).min)
    if second_mask is not None:
        mask = second_mask if mask is None else mask + second_mask
    if early_mask is not None:
        mask = early_mask * number
    if mask is not None and mask.dtype != query.dtype:  # kernels of a GPU take no other
        mask = mask.clamp(min=torch.finfo(query.dtype).min).to(query.dtype)  # a row of low numbers stays one
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
    """Compute attention as the model does, where torch's function lacks the arguments."""
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
    computed_by = (F.scaled_dot_product_attention,)
    hint = WRITTEN_OUT

    def alternatives(self) -> Iterable[Any]:
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
            weights = softmax_weights(ready, p, training)

            batches = torch.bmm(query, key)
            batches = any_of(batches * scale, batches / divisor, batches)
            batch_weights = F.softmax(any_of(batches + mask, batches), dim=-1)
            batch_weights = slapo.patterns.optional(F.dropout, batch_weights, p, training)
            return any_of(torch.matmul(weights, value), torch.bmm(batch_weights, value))

        yield scaled_dot_product_attention


def softmax_weights(scores: Any, p: Any, training: Any) -> Any:
    """Write softmax, cast and dropout, in the combinations that models use."""

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
