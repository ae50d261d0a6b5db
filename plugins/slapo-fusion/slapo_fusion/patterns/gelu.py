"""``fusion.gelu``, ``fusion.gelu_tanh``, ``fusion.bias_gelu``: the Gaussian error linear unit, written out or not."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import slapo_core as slapo

__all__ = ["BiasGelu", "Gelu", "GeluTanh", "exact", "quick", "tanh_approximation"]

_ROOT = math.sqrt(2.0)
_FACTOR = math.sqrt(2.0 / math.pi)
_SHORTENED = 0.7978845608
"""The factor as transformers' FastGELU has it: the last digit in float64 differs from that of torch's, no more."""


def exact(x: Any) -> Any:
    """GELU by the error function, in the ways to write it out: transformers' ``gelu_python``, minGPT's predecessors."""
    any_of = slapo.patterns.any_of
    erf = torch.erf(any_of(x / _ROOT, x * (1 / _ROOT), x * math.sqrt(0.5)))
    return _half_of(x, 1.0 + erf)


def tanh_approximation(x: Any) -> Any:
    """GELU by the hyperbolic tangent, written out: ``gelu_new``, ``gelu_fast`` and ``gelu_accurate`` of transformers.

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
    """CLIP's approximation of GELU, by a sigmoid."""
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

    def forms(self) -> Iterable[Any]:
        yield lambda x: exact(x)


class GeluTanh(slapo.Pattern):
    """GELU by the hyperbolic tangent, written out: 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))).

    transformers' ``gelu_new``, ``gelu_fast``, ``gelu_accurate`` and ``gelu_python_tanh``, traced with ``flatten=True``.
    Other constants are another function and not found.
    """

    name = "fusion.gelu_tanh"
    replacement = staticmethod(_gelu_tanh)

    def forms(self) -> Iterable[Any]:
        yield lambda x: tanh_approximation(x)


class BiasGelu(slapo.Pattern):
    """GELU of a sum with a bias: F.gelu(x + bias).

    Where the sum stands by itself, as behind ``decompose()``, or in ``F.linear(x, weight, bias)``, which then is a part
    of the match. The activation is torch's, exact or by tanh, or either of them written out, or ``quick_gelu``.
    """

    name = "fusion.bias_gelu"

    def forms(self) -> Iterable[Any]:
        yield lambda x, weight, bias: _any_gelu(slapo.patterns.any_of(x + bias, F.linear(x, weight, bias)))


def _any_gelu(x: Any) -> Any:
    return slapo.patterns.any_of(F.gelu(x), F.gelu(x, approximate="tanh"), exact(x), tanh_approximation(x), quick(x))
