"""Observe the floating-point types of a run, and its choices (top-k, routing)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slapo_runtime.ranks.checksums import parts_of
from slapo_verify.private import LOCAL_SCALAR, TorchDispatchMode, pytree, storage_id

_CHOOSE: dict[Any, int] = {torch.ops.aten.topk.default: 2, torch.ops.aten.max.dim: 1, torch.ops.aten.argmax.default: 1}
"""Operators that choose by the size of numbers, and the position of their axis argument; default: the last axis."""

_SAME_SCORES = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 0.25}
"""How far rounding may take scores, as a share of the span between the largest and the smallest."""


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the type with the largest rounding error; float64 without types."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values as a plain tensor: dequantized, or with parts concatenated."""
    parts = parts_of(tensor)
    if parts is None:
        return tensor
    if hasattr(type(tensor), "__tensor_flatten__") and not tensor.is_nested:
        with contextlib.suppress(NotImplementedError, RuntimeError):
            return tensor.dequantize()
    return torch.cat([plain(part).reshape(-1).to(tensor.dtype) for part in parts])


def own_dtype(model: nn.Module, inputs: Iterable[torch.Tensor] = ()) -> torch.dtype:
    """Return the coarsest floating-point type of a model, or else of its inputs.

    A complex type counts as that of its parts.
    """
    tensors = [*model.parameters(), *model.buffers()]
    found = {tensor.dtype.to_real() for tensor in tensors if is_inexact(tensor)}
    found = found or {tensor.dtype.to_real() for tensor in inputs if is_inexact(tensor)}
    return coarsest(found) if found else torch.get_default_dtype()


def dtype_name(dtype: torch.dtype) -> str:
    """Format a type as ``"float64"``."""
    return str(dtype).removeprefix("torch.")


class DtypeObserver(TorchDispatchMode):
    """Record the types of all computations, and the coarsest behind each tensor.

    A constant that is only made (a mask of zeros in the default type) rounds nothing and does not count.

    Attributes:
        seen: the types.
        choices: made by floating-point numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.choices: list[Choice] = []
        self.seen: set[torch.dtype] = set()
        self._through: dict[int, torch.dtype] = {}  # storage -> the coarsest type its values went through
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
            self._through[storage_id(leaf)] = coarsest(
                [way, leaf.dtype.to_real()] if rounds and is_inexact(leaf) else [way]
            )
        choice = Choice.of(func, args, kwargs or {}, result)
        self.choices += [] if choice is None else [choice]
        if func is LOCAL_SCALAR:
            self._scalars = coarsest([self._scalars, way])
        return result

    def coarsest_to(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the coarsest type on the way to a tensor, inputs included."""
        return coarsest([self._way(tensor), self._scalars])

    def _way(self, tensor: torch.Tensor) -> torch.dtype:
        own = tensor.dtype.to_real() if is_inexact(tensor) else torch.float64
        return self._through.get(storage_id(tensor), own)


@dataclass(frozen=True, eq=False)
class Choice:
    """Describe indices chosen by scores, e.g. the experts of each token.

    Args:
        call: the operator, and its arguments behind the scores.
        axis: along which it chose.
        scores: a copy.
        indices: a copy.
    """

    call: tuple[Any, ...]
    axis: int
    scores: torch.Tensor
    indices: torch.Tensor

    @classmethod
    def of(cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> Choice | None:
        """Return the choice of a call; None if it does not choose along an axis."""
        position = _CHOOSE.get(func)
        if position is None or not is_inexact(args[0]):
            return None
        axis = args[position] if len(args) > position else kwargs.get("dim", None if position == 1 else -1)
        if not isinstance(axis, int) or not args[0].numel():
            return None
        indices = made if isinstance(made, torch.Tensor) else made[1]
        return cls((func, *args[1:], kwargs), axis, args[0].detach().clone(), indices.detach().clone())

    def apart(self, other: Choice) -> torch.Tensor:
        """Return the distances between two choices' scores, in float64."""
        one, two = self.scores.double(), other.scores.to(self.scores.device).double()
        return torch.where(one == two, 0.0, (one - two).abs()).nan_to_num(nan=torch.inf)


class ChoosesAlike(TorchDispatchMode):
    """Repeat another run's choices wherever scores are equal up to rounding.

    Rounding decides near ties, and one token that goes to another expert is a large difference.

    Args:
        choices: of the other run.
        dtype: the coarsest type in which this one computes; the scores themselves may be finer.
    """

    def __init__(self, choices: Sequence[Choice], dtype: torch.dtype) -> None:
        super().__init__()
        self._choices, self._share = choices, _SAME_SCORES.get(dtype, 0.0)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        own = Choice.of(func, args, kwargs or {}, made)
        if own is None:
            return made
        alike = [each for each in self._choices if each.call == own.call and each.scores.shape == own.scores.shape]
        if not alike:
            return made
        other = min(alike, key=lambda each: float(own.apart(each).sum()))  # calls may come in another order, or again
        axis, scores, indices = own.axis, own.scores, other.indices.to(own.indices.device)
        finite = scores[scores.isfinite()].double()
        span = float(finite.max() - finite.min()) if finite.numel() else 0.0
        near = (own.apart(other) <= self._share * span).all(axis, keepdim=True)
        keeps_axis = indices.dim() == scores.dim()
        indices = torch.where(near if keeps_axis else near.squeeze(axis), indices, own.indices)
        if isinstance(made, torch.Tensor):
            return indices
        values = scores.gather(axis, indices if keeps_axis else indices.unsqueeze(axis))
        return (values if keeps_axis else values.squeeze(axis)), indices


def is_inexact(leaf: Any) -> bool:
    """Return whether a value is a tensor of floating-point or complex numbers."""
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
