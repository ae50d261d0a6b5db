"""``fusion.swiglu`` and ``fusion.swiglu_projections``: the gated unit of LLaMA's MLP."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import functional as F

import slapo_core as slapo

__all__ = ["SwiGlu", "SwiGluProjections"]


class SwiGlu(slapo.Pattern):
    """SwiGLU without its projections: F.silu(gate) * up.

    ``gate`` and ``up`` are any two values: of two layers, or the halves of one. Written out, SiLU is
    ``gate * torch.sigmoid(gate)``. Gates with another activation (GELU, sigmoid) are not found.
    """

    name = "fusion.swiglu"

    def forms(self) -> Iterable[Any]:
        yield lambda gate, up: _silu(gate) * up


class SwiGluProjections(slapo.Pattern):
    """SwiGLU with its projections: F.silu(gate_layer(x)) * up_layer(x).

    Both are ``nn.Linear`` or ``F.linear``, with or without a bias.
    """

    name = "fusion.swiglu_projections"

    def forms(self) -> Iterable[Any]:
        def swiglu(x: Any, gate_weight: Any, gate_bias: Any, up_weight: Any, up_bias: Any) -> Any:
            any_of = slapo.patterns.any_of
            gate = any_of(F.linear(x, gate_weight), F.linear(x, gate_weight, gate_bias))
            return _silu(gate) * any_of(F.linear(x, up_weight), F.linear(x, up_weight, up_bias))

        yield swiglu


def _silu(gate: Any) -> Any:
    return slapo.patterns.any_of(F.silu(gate), gate * torch.sigmoid(gate))
