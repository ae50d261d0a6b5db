"""``fusion.causal_sdpa``: attention by a causal mask, and torch's own without the mask in its place."""

from __future__ import annotations

import math
from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

import slapo_core as slapo
from slapo_core import ApplyError
from slapo_fusion.patterns import LOW, WRITTEN_OUT, softmax_weights
from slapo_fusion.private import assert_on_device, version_of

_CONSTANT = slapo.patterns.any_constant()

_CHECKED: MutableMapping[Tensor, int] = WeakIdKeyDictionary()
"""Causal masks and their versions, as long as they are in use: one of a model is checked once for all layers."""


def causal_attention(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    few_keys: Tensor | None = None,
    few_values: Tensor | None = None,
    mask: Tensor | None = None,
    hidden: Tensor | None = None,
    visible: Tensor | None = None,
    fill: float = -math.inf,
    scale: float = 1.0,
    divisor: float = 1.0,
    p: float = 0.0,
    training: bool = True,
    groups: int = 1,
) -> Tensor:
    """Compute matches of ``fusion.causal_sdpa`` by ``F.scaled_dot_product_attention(..., is_causal=True)``.

    Args:
        query: (..., heads, length, size of a head).
        key: (..., heads, size of a head, length): transposed, as the product with the query takes it.
        value: (..., heads, length, size of a value).
        few_keys: (..., fewer heads, length, size of a head), each of which several heads share.
        few_values: the same, of values.
        mask: added to the scaled scores; 0 up to the diagonal, and a low number behind it.
        hidden: boolean; where it is true the scores become ``fill``.
        visible: boolean; where it is false they do.
        fill: a low number.
        scale: the scores are multiplied by it.
        divisor: the scores are divided by it.
        p: the probability of dropping a weight.
        training: whether to drop.
        groups: the number of heads that share one of ``few_keys``.

    Raises:
        ApplyError: the mask is not causal by its shape, or is learned.
        RuntimeError: the mask is not causal by its values; on a GPU an assertion of the device, without a host
            synchronization.
    """
    keys, values = (few_keys, few_values) if key is None else (key.transpose(-2, -1), value)
    given = next(each for each in (mask, hidden, visible) if each is not None)
    assert keys is not None
    assert values is not None
    lengths = (query.shape[-2], keys.shape[-2])
    if lengths[0] != lengths[1] or tuple(given.shape[-2:]) != lengths or fill > LOW or given.requires_grad:
        what = " that requires a gradient" if given.requires_grad else ""
        raise ApplyError(
            f"fusion.causal_sdpa: the mask is not causal: shape {tuple(given.shape)}{what}, for {lengths[0]} queries "
            f"and {lengths[1]} keys, fill {fill}",
            hint='replace(match="fusion.sdpa"), which keeps the mask',
        )
    _require_causal(given, hidden=None if given is mask else given is hidden)
    is_shared = key is None and keys.shape[-1] == values.shape[-1] <= 256  # as torch's fast kernels require
    if key is None and not is_shared:
        keys, values = (each.repeat_interleave(groups, -3) for each in (keys, values))
    out = F.scaled_dot_product_attention(
        query,
        keys,
        values.to(query.dtype),
        dropout_p=p if training else 0.0,
        is_causal=True,
        scale=scale / divisor,
        enable_gqa=is_shared,
    )
    return out.to(values.dtype)


def _require_causal(mask: Tensor, *, hidden: bool | None) -> None:
    """Assert on the mask's device that it hides the keys behind the diagonal only.

    Args:
        mask: (..., length, length).
        hidden: whether True in a boolean mask hides a key; None: a mask that is added to the scores.
    """
    is_captured = mask.is_cuda and torch.cuda.is_current_stream_capturing()
    is_known = not torch.compiler.is_compiling() and not is_captured and not mask.is_inference()  # which has no version
    if is_known and _CHECKED.get(mask) == version_of(mask):
        return
    behind = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    if hidden is None:
        is_causal = torch.where(behind, mask <= LOW, mask == 0)
    else:
        is_causal = mask == (behind if hidden else ~behind)
    assert_on_device(is_causal.all(), "fusion.causal_sdpa: the mask is not causal (padding, a window, or a bias)")
    if is_known:
        _CHECKED[mask] = version_of(mask)


class CausalScaledDotProductAttention(slapo.Pattern):
    """Attention by a causal mask, written out: softmax(query @ key * scale + mask) @ value.

    Replace it where every mask of the model is causal: no padding, no sliding window, no keys of the past.
    ``is_causal=True`` takes its place, so that FlashAttention can be chosen, which accepts no mask. A mask reaches a
    layer as an argument: its values are checked at the call, once for each mask, by an assertion on the device.
    ``fusion.sdpa`` accepts any mask.

    Keys and values that heads share are taken before they are repeated, as ``repeat_kv`` of transformers does it; torch
    has fast kernels for these without a mask only. Its other alternatives are the ones of ``fusion.sdpa`` that have one
    mask and a constant scale.
    """

    name = "fusion.causal_sdpa"
    replacement = staticmethod(causal_attention)
    results_only = True
    computed_by = (F.scaled_dot_product_attention,)
    hint = WRITTEN_OUT

    def alternatives(self) -> Iterable[Any]:
        def causal_scaled_dot_product_attention(
            query: Any,
            key: Any,
            value: Any,
            few_keys: Any,
            few_values: Any,
            mask: Any,
            hidden: Any,
            visible: Any,
            fill: Any = _CONSTANT,
            scale: Any = _CONSTANT,
            divisor: Any = _CONSTANT,
            p: Any = _CONSTANT,
            training: Any = _CONSTANT,
            groups: Any = _CONSTANT,
        ) -> Any:
            any_of = slapo.patterns.any_of
            shared = torch.matmul(query, _repeated(few_keys, groups).transpose(2, 3)) * scale + mask
            scores = torch.matmul(query, key)
            multiplied, divided = scores * scale, scores / divisor
            scaled = any_of(multiplied, divided, scores)
            own = any_of(
                scaled + mask,
                scaled.masked_fill(hidden, fill),
                torch.where(visible, any_of(multiplied, divided), fill),
            )
            return any_of(
                torch.matmul(softmax_weights(shared, p, training), _repeated(few_values, groups)),
                torch.matmul(softmax_weights(own, p, training), value),
            )

        yield causal_scaled_dot_product_attention


def _repeated(x: Any, groups: Any) -> Any:
    """Return keys or values, each head repeated."""
    sizes = x.shape
    batch, heads, length, features = (sizes[axis] for axis in range(4))  # each is one value in the graph
    wide = x[:, :, None, :, :].expand(batch, heads, groups, length, features)
    return wide.reshape(batch, heads * groups, length, features)
