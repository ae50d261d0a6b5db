"""``fusion.bias_dropout_add_norm``: what stands between two halves of a transformer layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.nn import functional as F

import slapo_core as slapo

__all__ = ["BiasDropoutAddNorm"]

_CONSTANT = slapo.patterns.any_constant()


class BiasDropoutAddNorm(slapo.Pattern):
    """Bias, dropout, residual and LayerNorm: F.layer_norm(F.dropout(x + bias) + residual).

    The bias is found where its sum stands by itself before a dropout, as behind ``decompose()``; otherwise ``x`` has it
    already. Dropout may be absent. The sum may be made two-dimensional before the norm, as in OPT. Where the sum is
    used behind the norm too, as in layers that begin with their norm, it is a second output of the match.
    """

    name = "fusion.bias_dropout_add_norm"

    def forms(self) -> Iterable[Any]:
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
