"""In which floating-point types a model computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DtypeObserver", "coarsest", "dtype_name", "is_inexact", "own_dtype"]


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The type with the largest rounding error; float64 if there is none."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)


def own_dtype(model: nn.Module, inputs: Iterable[torch.Tensor] = ()) -> torch.dtype:
    """The coarsest floating-point type among a model's parameters and buffers, or else among its inputs.

    A complex type counts as that of its parts.
    """
    tensors = [*model.parameters(), *model.buffers()]
    found = {tensor.dtype.to_real() for tensor in tensors if is_inexact(tensor)}
    found = found or {tensor.dtype.to_real() for tensor in inputs if is_inexact(tensor)}
    return coarsest(found) if found else torch.get_default_dtype()


def dtype_name(dtype: torch.dtype) -> str:
    """``"float64"``."""
    return str(dtype).removeprefix("torch.")


class DtypeObserver(TorchDispatchMode):
    """Notes the floating-point types of everything computed from floating-point tensors, and which tensor took which.

    A constant that is only made (a mask of zeros in the default type) rounds nothing and does not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()
        self._through: dict[int, torch.dtype] = {}  # storage -> the coarsest type on the way to what is in it
        self._scalars = torch.float64  # and to all that became a Python number, from where it cannot be followed

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        rounds = any(is_inexact(leaf) for leaf in given)
        if rounds:
            self.seen.update(leaf.dtype.to_real() for leaf in made if is_inexact(leaf))
        way = coarsest(self._way(leaf) for leaf in given)
        for leaf in made:
            self._through[_storage(leaf)] = coarsest(
                [way, leaf.dtype.to_real()] if rounds and is_inexact(leaf) else [way]
            )
        if func is torch.ops.aten._local_scalar_dense.default:
            self._scalars = coarsest([self._scalars, way])
        return result

    def coarsest_to(self, tensor: torch.Tensor) -> torch.dtype:
        """The coarsest type on the way to a tensor that was computed under this mode, the inputs' own included."""
        return coarsest([self._way(tensor), self._scalars])

    def _way(self, tensor: torch.Tensor) -> torch.dtype:
        own = tensor.dtype.to_real() if is_inexact(tensor) else torch.float64
        return self._through.get(_storage(tensor), own)


def _storage(tensor: torch.Tensor) -> int:
    """Views share it; autograd keeps it alive, where it drops the tensor object."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def is_inexact(leaf: Any) -> bool:
    """Whether it is a tensor of floating-point or complex numbers, which are rounded and have gradients."""
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
