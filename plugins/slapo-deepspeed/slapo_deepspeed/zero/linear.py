"""DeepSpeed's linear function of ZeRO-3, which keeps no gathered weight from forward to backward, where it belongs.

DeepSpeed puts it in the place of ``torch.nn.functional.linear`` for the whole process and for good: patterns and graphs
of other models would find it there. Here it is in force during the steps of an engine, for partitioned weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.torch_version import TorchVersion

__all__ = ["linear_of_torch", "partitioned_linear"]

_IS_COMPILED_RIGHT = TorchVersion(torch.__version__) >= "2.13"
"""Older dynamo (2.11 at least) loses the weights' gradients in DeepSpeed's function; torch's own keeps them there, and
the gathered weights from forward to backward."""


@contextlib.contextmanager
def linear_of_torch() -> Iterator[None]:
    """Around what makes DeepSpeed's engine: afterwards ``torch.nn.functional.linear`` is what it was before."""
    before = functional.linear
    try:
        yield
    finally:
        functional.linear = before


@contextlib.contextmanager
def partitioned_linear(config: Mapping[str, Any]) -> Iterator[None]:
    """Around forward and backward: weights that ZeRO-3 partitions go through DeepSpeed's function, all others do not.

    Args:
        config: DeepSpeed's, filled in; nothing is done without ZeRO-3, or with ``memory_efficient_linear`` false.
    """
    zero = config.get("zero_optimization", {})
    if zero.get("stage") != 3 or not zero.get("memory_efficient_linear", True):
        yield
        return
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    before = functional.linear

    def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if hasattr(weight, "ds_id") and (_IS_COMPILED_RIGHT or not torch.compiler.is_compiling()):
            return zero3_linear_wrap(input, weight, bias)  # type: ignore[no-any-return]
        return before(input, weight, bias)

    functional.linear = linear
    try:
        yield
    finally:
        functional.linear = before
