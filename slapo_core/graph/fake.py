"""Tensors without values, as a recording runs on them."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import FakeTensorMode

__all__ = ["FakeMode"]


class FakeMode(FakeTensorMode):
    """Computes shapes and types only; real tensors that it meets (parameters) are taken as if they were fake.

    Grouped matrix products are computed in every type here: torch's shape function refuses all but bfloat16, where its
    kernels take float32 too, and so do the experts of nearly all mixtures.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            return _grouped_product(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _grouped_product(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    if a.dim() == 2:
        shape = (len(offs), a.shape[0], b.shape[1]) if b.dim() == 2 else (a.shape[0], b.shape[-1])
    else:
        shape = (a.shape[1], b.shape[1]) if b.dim() == 2 else (a.shape[0], a.shape[1], b.shape[-1])
    return torch.empty(shape, dtype=out_dtype or a.dtype, device=a.device)
