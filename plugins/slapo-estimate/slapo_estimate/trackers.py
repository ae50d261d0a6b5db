"""Observers of the operations of a step: floating-point operations and collectives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from slapo_core.errors import EstimateError
from slapo_estimate.private import (
    ADDED_PRODUCTS,
    ATTENTION,
    ATTENTION_BACKWARD,
    MATRIX_PRODUCTS,
    FakeTensor,
    TorchDispatchMode,
    flop_formulas,
    tree_leaves,
)
from slapo_runtime.receipts.collectives import CollectiveReader, wait_operations

if TYPE_CHECKING:
    from slapo_estimate.values import KnownValues
    from slapo_runtime.receipts.attribution import PositionTracker
    from slapo_runtime.receipts.collectives import CollectiveCall, MeshGroups

Formula = Callable[..., int]
"""Arguments of an operation, and its result as ``out_val`` -> FLOPs; a multiply-add is two."""

aten = torch.ops.aten


class FlopTracker:
    """Count the FLOPs of matrix products, recomputation included; an observer.

    Only products count, as for torch's ``FlopCounterMode``: elementwise operations are bound by memory.

    Attributes:
        total: FLOPs of the current step.
        last: FLOPs of the last operation.
    """

    def __init__(self) -> None:
        self.total = self.last = 0
        self._formulas: dict[Any, Formula | None] = {}
        self._packets: dict[Any, Formula] = {**flop_formulas(), **_MISSING_FORMULAS}

    def begin(self) -> None:
        """Begin a training step."""
        self.total = 0

    def on_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Count the FLOPs of an operation."""
        try:
            formula = self._formulas[func]
        except KeyError:
            formula = self._formulas[func] = self._packets.get(getattr(func, "overloadpacket", func))
        if formula is None:
            self.last = 0
        else:
            self.last = formula(*args, **kwargs, out_val=result)
            self.total += self.last


def _product(a: Sequence[int], b: Sequence[int]) -> int:
    """Count a product of matrices or batches; a grouped product counts in full.

    Args:
        a: shape ``(..., m, k)``.
        b: shape ``(..., k, n)``.
    """
    batch = a[0] if len(a) == 3 and len(b) == 3 else 1
    return 2 * batch * a[-2] * a[-1] * b[-1]


def _matrix(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> int:
    return _product(a.shape, b.shape)


def _added_matrix(_: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *__: Any, **___: Any) -> int:
    return _product(a.shape, b.shape)


def _vector(a: torch.Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel()


def _added_vector(_: torch.Tensor, a: torch.Tensor, *__: Any, **___: Any) -> int:
    return 2 * a.numel()


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    """Count the scores and the weighted sum; causal attention counts in full, as in torch's formulas."""
    batch, heads, length, size = query.shape
    return 2 * batch * heads * length * key.shape[-2] * (size + value.shape[-1])


def _attention_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    """Count the recomputed scores, and the gradients of scores, values, queries and keys."""
    batch, heads, length, size = query.shape
    return 2 * batch * heads * length * key.shape[-2] * (3 * size + 2 * value.shape[-1])


def _convolution_backward(
    gradient: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Sequence[bool],
    **_: Any,
) -> int:
    """Count one forward for each gradient; torch's formula ignores groups."""
    positions = (input if transposed else gradient).shape[2:]
    forward = 2 * gradient.shape[0] * math.prod(positions) * weight.numel()
    return forward * (int(output_mask[0]) + int(output_mask[1]))


_MISSING_FORMULAS: dict[Any, Formula] = {
    **dict.fromkeys(ATTENTION, _attention),
    **dict.fromkeys(ATTENTION_BACKWARD, _attention_backward),
    **dict.fromkeys(MATRIX_PRODUCTS, _matrix),
    **dict.fromkeys(ADDED_PRODUCTS, _added_matrix),
    aten.mv: _vector,
    **dict.fromkeys((aten.addmv, aten.addmv_), _added_vector),
    aten.dot: _vector,
    aten.vdot: _vector,
    aten.addr: lambda _, a, b, *__, **___: 2 * a.numel() * b.numel(),
    aten.convolution_backward: _convolution_backward,
}


def refuse_layout(tensor: torch.Tensor) -> None:
    """Refuse a tensor whose size depends on its values."""
    raise EstimateError(
        f"the size of a tensor of layout {tensor.layout} is unknown without its values",
        hint="use a strided tensor, e.g. nn.Embedding(..., sparse=False)",
    )


class CollectiveTracker:
    """List the collectives of a step; an observer.

    Args:
        position: module, step and phase of the running operation.
        groups: the process groups of the mesh.

    Attributes:
        last: collectives of the last operation.
    """

    def __init__(self, position: PositionTracker, groups: MeshGroups) -> None:
        self._position, self._reader = position, CollectiveReader(groups)
        self.last: Sequence[CollectiveCall] = ()
        self._found: list[CollectiveCall] = []

    @property
    def collectives(self) -> tuple[CollectiveCall, ...]:
        """The collectives of the current step, in the order of their start."""
        return tuple(self._found)

    def begin(self) -> None:
        """Begin a training step."""
        self._found.clear()

    def on_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """List the collectives of an operation."""
        if not self._reader.communicates(func):
            self.last = ()
            return
        at = self._position
        self.last = list(self._reader.read(func, args, kwargs, (at.module, at.record, at.step)))
        self._found.extend(self.last)


class OperationObserver(Protocol):
    """Observe the operations of a step."""

    def begin(self) -> None:
        """Begin a training step."""

    def on_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Observe an operation after it ran."""


class ObserverMode(TorchDispatchMode):
    """Run each operation, then call the observers.

    Args:
        observers: called in this order.
        values: runs the operations.
    """

    def __init__(self, observers: Sequence[OperationObserver], values: KnownValues) -> None:
        super().__init__()
        self._run, self._mode = values.run, values.mode
        self._saw = tuple(observer.on_operation for observer in observers)
        self._device = torch.ops.prim.device.default
        self._waits = wait_operations()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self._device:  # a query, the most frequent one
            return func(*args)
        if DTensor in types:
            return NotImplemented  # its operations on local tensors are dispatched again
        kwargs = kwargs or {}
        # Waiting returns its argument; on fake tensors torch would make new ones.
        result = args[0] if func in self._waits else self._run(func, args, kwargs)
        if not self._is_recorded(result):
            for on_operation in self._saw:
                on_operation(func, args, kwargs, result)
        return result

    def _is_recorded(self, result: Any) -> bool:
        """Return whether the result belongs to a graph being recorded, which has its own fake mode."""
        leaves = tree_leaves(result) if isinstance(result, (tuple, list)) else (result,)
        return self._mode is not None and any(
            isinstance(leaf, FakeTensor) and leaf.fake_mode is not self._mode for leaf in leaves
        )
