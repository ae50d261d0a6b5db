"""Tensors without values, as a recording runs on them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from slapo_core.graph.structure import children, is_plain, rebuild

__all__ = ["FakeMode", "with_own_values", "without_values"]


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


def without_values(mode: FakeMode, value: Any) -> Any:
    """``value`` with tensors without values for its own; one that appears twice does so again.

    Objects that a recording may not look into (a cache, say) are copied: modules that stay calls may change them.

    Raises:
        TypeError: an object cannot be copied.
    """
    return _with_tensors(value, lambda tensor: mode.from_tensor(tensor, static_shapes=True), {})


def with_own_values(value: Any) -> Any:
    """The same with copies that have values."""
    return _with_tensors(value, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), {})


def _with_tensors(value: Any, copied: Callable[[torch.Tensor], Any], known: dict[int, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        if isinstance(value, FakeTensor):
            return value
        if id(value) not in known:
            known[id(value)] = copied(value)
        return known[id(value)]
    parts = children(value)
    if parts is not None:
        return rebuild(value, [_with_tensors(part, copied, known) for _, _, part in list(parts)])
    if is_plain(value) or isinstance(value, nn.Module):
        return value
    with _Copying(lambda tensor: _with_tensors(tensor, copied, known)):
        return copy.deepcopy(value)


class _Copying(TorchFunctionMode):
    """Tensors that are copied within an object."""

    def __init__(self, copied: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.copied = copied

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return self.copied(args[0])
        return func(*args, **(kwargs or {}))
