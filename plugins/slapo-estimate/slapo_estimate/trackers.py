"""Observers of the operations of a step: memory and floating-point operations."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from slapo_core.errors import EstimateError
from slapo_estimate.collectives import wait_operations
from slapo_estimate.private import (
    ADDED_PRODUCTS,
    ATTENTION,
    ATTENTION_BACKWARD,
    MATRIX_PRODUCTS,
    FakeTensor,
    TorchDispatchMode,
    flop_formulas,
    is_traceable_wrapper_subclass,
    resizes_through,
    storage_id,
    tree_leaves,
)
from slapo_estimate.results import Memory

if TYPE_CHECKING:
    from slapo_estimate.attribution import PositionTracker
    from slapo_estimate.values import KnownValues

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


_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)
_KINDS = {
    "forward": "activations",
    "recomputation": "activations",
    "backward": "temporaries",
    "optimizer": "temporaries",
}


class _TrackedStorage:
    """A storage: bytes, kind, and a weak reference that reports its end."""

    __slots__ = ("kind", "reference", "size")

    def __init__(self, kind: str, size: int) -> None:
        self.kind, self.size = kind, size
        self.reference: Any = None


class MemoryTracker:
    """Count the bytes of storages by kind, and keep the counts at the peak; an observer.

    Args:
        position: module, step and phase of the running operation.
    """

    def __init__(self, position: PositionTracker) -> None:
        self._position = position
        self._storages: dict[int, _TrackedStorage] = {}
        self._held: dict[str, int] = {}
        self._total = self._most = 0
        self._peak = self._earlier = Memory()

    @property
    def peak(self) -> Memory:
        """The counts at the peak of all steps; of equal peaks the last one."""
        return self._earlier if self._earlier.total > self._peak.total else self._peak

    @property
    def total(self) -> int:
        """Bytes in use now."""
        return self._total

    def begin(self) -> None:
        """Begin a training step with its own peak: the first step lacks the optimizer's state."""
        self._earlier, self._peak, self._most = self.peak, Memory(), 0

    def hold(self, tensors: Iterable[torch.Tensor | None], kind: str) -> None:
        """Count the storages of ``tensors`` as ``kind`` instead of their former kind."""
        for tensor in tensors:
            if tensor is not None:
                for storage in _storages(tensor):
                    held = self._storages.get(storage_id(storage))
                    if held is None:
                        self._add(storage, kind)
                    elif held.kind != kind:
                        self._held[held.kind] -= held.size
                        held.kind = kind
                        self._held[kind] = self._held.get(kind, 0) + held.size
        self._look()

    def forget_peak(self) -> None:
        """Forget the peak so far: the construction of a runtime does not count."""
        self._earlier, self._peak, self._most = Memory(), Memory(), 0

    def reclassify_as_optimizer_state(self) -> None:
        """Count live activations and temporaries as optimizer state: a runtime keeps them between steps."""
        for held in self._storages.values():
            if held.kind in ("activations", "temporaries"):
                self._held[held.kind] -= held.size
                held.kind = "optimizer"
                self._held[held.kind] = self._held.get(held.kind, 0) + held.size

    def on_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Count storages that an operation allocated or resized."""
        for leaf in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                for storage in _storages(leaf):
                    held = self._storages.get(storage_id(storage))
                    if held is None:
                        self._add(storage, _KINDS[self._position.phase])
                    elif held.size != storage.nbytes():
                        self._change(held, storage.nbytes())
        self._look()

    def watching(self) -> AbstractContextManager[None]:
        """Track storages that are resized by their own method, which is not an operation."""

        def noticed(run: Callable[..., Any], storage: torch.UntypedStorage, size: int) -> Any:
            result = run(storage, size)
            held = self._storages.get(storage_id(storage))
            if held is not None:
                self._change(held, storage.nbytes())
                self._look()
            return result

        return resizes_through(noticed)

    def _look(self) -> None:
        if self._total > self._most:
            self._most = self._total
            self._peak = Memory(**self._held, module=self._position.module, phase=self._position.phase)

    def _add(self, storage: torch.UntypedStorage, kind: str) -> None:
        key, held = storage_id(storage), _TrackedStorage(kind, storage.nbytes())
        held.reference = weakref.ref(storage, lambda _: self._gone(key, held))
        self._storages[key] = held
        self._held[kind] = self._held.get(kind, 0) + held.size
        self._total += held.size

    def _change(self, held: _TrackedStorage, size: int) -> None:
        self._held[held.kind] += size - held.size
        self._total += size - held.size
        held.size = size

    def _gone(self, key: int, held: _TrackedStorage) -> None:
        if self._storages.get(key) is held:  # another storage may have its address already
            del self._storages[key]
        self._change(held, 0)


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of a tensor, and of a wrapper subclass's inner tensors."""
    if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
        for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
            if isinstance(part, torch.Tensor):  # a DTensor lists its mesh, too
                yield from _storages(part)
    elif tensor.layout is torch.strided:
        if not tensor.is_meta:  # a runtime's placeholder
            yield tensor.untyped_storage()
    else:
        raise EstimateError(
            f"the size of a tensor of layout {tensor.layout} is unknown without its values",
            hint="use a strided tensor, e.g. nn.Embedding(..., sparse=False)",
        )


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
