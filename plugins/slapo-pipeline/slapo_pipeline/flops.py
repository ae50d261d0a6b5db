"""Floating-point operations of torch's calls, counted as they are dispatched."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

__all__ = ["FlopCount", "flops_of"]

aten = torch.ops.aten


class FlopCount(TorchDispatchMode):
    """Adds up the operations of matrix products, convolutions and attention: two for each multiplication and addition.

    With tensors without values it counts the same. Attention counts whole, whatever a mask leaves out, as in
    ``torch.utils.flop_counter``, which leaves out attention on the CPU.

    Attributes:
        total: so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.total += flops_of(func, args, kwargs or {}, out)
        return out


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Of one dispatched call."""
    packet = getattr(func, "_overloadpacket", None)
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        query, key, value = args[:3]
        return int(sdpa_flop_count(query.shape, key.shape, value.shape))
    if packet is aten._grouped_mm:
        return _grouped_product(args[0], args[1])
    if packet is aten.mv or packet is aten.addmv:
        matrix = args[0] if packet is aten.mv else args[1]
        return 2 * int(matrix.numel())
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0


def _grouped_product(a: torch.Tensor, b: torch.Tensor) -> int:
    """Each row, or each column, goes through one of the groups."""
    if a.dim() == 2:  # (rows, k) by (groups, k, columns), or (rows, k) by (k, columns) in groups along k
        return 2 * a.shape[0] * a.shape[1] * b.shape[-1]
    return 2 * a.shape[0] * a.shape[1] * a.shape[2] * b.shape[-1] // (1 if b.dim() == 3 else a.shape[0])
