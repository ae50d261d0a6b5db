"""`BatchForm`: for which calls stages are the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["BatchForm"]

_PLAIN = (bool, int, float, complex, str, bytes, tuple, type(None), torch.dtype, torch.device, torch.Size)


class BatchForm:
    """What stages are made for; compared, never hashed: arguments need not be hashable.

    Two are equal if their arguments have the same names, structure and plain values, their tensors the same shape,
    type, device and need of a gradient, the same ones of them are one object, and every module is in the same mode.

    Args:
        inputs: the arguments of the model's forward, by parameter.
        modes: of the modules, in their order.
    """

    def __init__(self, inputs: Mapping[str, Any], modes: Sequence[bool]) -> None:
        leaves, self._structure = pytree.tree_flatten(dict(inputs))
        first = {id(leaf): number for number, leaf in reversed(list(enumerate(leaves)))}
        self._leaves = [_tensor(leaf, first) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._modes = list(modes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BatchForm):
            return NotImplemented
        if (self._structure, self._modes) != (other._structure, other._modes):
            return False
        return all(map(_is_same, self._leaves, other._leaves))

    @property
    def is_plain(self) -> bool:
        """Whether all arguments are tensors and plain values: others may be changed and still be the same object."""
        return all(type(leaf) in _PLAIN for leaf in self._leaves)

    def is_like(self, other: BatchForm) -> bool:
        """Whether they differ in the number of samples at most: in the first axis of tensors."""
        if (self._structure, self._modes) != (other._structure, other._modes):
            return False
        return all(
            _is_same((one[0][1:], *one[1:]), (two[0][1:], *two[1:]))
            if type(one) is type(two) is tuple
            else _is_same(one, two)
            for one, two in zip(self._leaves, other._leaves, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]


def _tensor(tensor: torch.Tensor, first: Mapping[int, int]) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad, first[id(tensor)])


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return type(one) is type(other) and type(one) in _PLAIN and bool(one == other)
