"""Memory of a step: the bytes of storages by kind, and their peak."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from slapo_runtime.private import (
    FakeTensor,
    is_traceable_wrapper_subclass,
    resizes_through,
    storage_id,
    tree_leaves,
)

if TYPE_CHECKING:
    from slapo_runtime.receipts.attribution import PositionTracker


@dataclass(frozen=True)
class Memory:
    """Bytes of tensors on one rank's device at the peak of a step.

    A caching allocator rounds each tensor up (CUDA's to 512 bytes) and keeps freed memory; libraries (cuBLAS, NCCL) and
    the process need memory of their own: leave room for them.

    Args:
        parameters: parameters of the model.
        buffers: buffers of the model.
        gradients: gradients of the parameters.
        optimizer: the optimizer's state.
        activations: tensors kept by the forward pass for the backward pass, or still in use by the forward pass.
        temporaries: tensors made by the backward pass, or within the optimizer's step.
        inputs: the batch.
        module: path of the module that ran; ``""`` for the model, ``"optimizer"`` for the optimizer's step.
        phase: ``"forward"``, ``"backward"``, ``"recomputation"`` (of checkpointed modules) or ``"optimizer"``.
    """

    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    temporaries: int = 0
    inputs: int = 0
    module: str = ""
    phase: str = "forward"

    @property
    def total(self) -> int:
        """The sum of all kinds, in bytes."""
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, int]:
        """Return the bytes of each kind."""
        return {kind: getattr(self, kind) for kind in _KINDS}


_KINDS = ("parameters", "buffers", "gradients", "optimizer", "activations", "temporaries", "inputs")


_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)
_KIND_OF_PHASE = {
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


def _leave_out(tensor: torch.Tensor) -> None:
    """Leave a tensor without strides out."""


class MemoryTracker:
    """Count the bytes of storages by kind, and keep the counts at the peak; an observer.

    Args:
        position: module, step and phase of the running operation.
        without_strides: is given tensors of other layouts than strided ones, which are not counted.
    """

    def __init__(self, position: PositionTracker, without_strides: Callable[[torch.Tensor], None] = _leave_out) -> None:
        self._position, self._without_strides = position, without_strides
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

    def of(self, kind: str) -> int:
        """Return the bytes of a kind in use now."""
        return self._held.get(kind, 0)

    def begin(self) -> None:
        """Begin a training step with its own peak: the first step lacks the optimizer's state."""
        self._earlier, self._peak, self._most = self.peak, Memory(), 0

    def hold(self, tensors: Iterable[torch.Tensor | None], kind: str) -> None:
        """Count the storages of ``tensors`` as ``kind`` instead of their former kind."""
        for tensor in tensors:
            if tensor is not None:
                for storage in self._storages_of(tensor):
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
                for storage in self._storages_of(leaf):
                    held = self._storages.get(storage_id(storage))
                    if held is None:
                        self._add(storage, _KIND_OF_PHASE[self._position.phase])
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

    def _storages_of(self, tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
        """Yield the storages of a tensor, and of a wrapper subclass's inner tensors."""
        if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
            for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
                if isinstance(part, torch.Tensor):  # a DTensor lists its mesh, too
                    yield from self._storages_of(part)
        elif tensor.layout is not torch.strided:
            self._without_strides(tensor)
        elif not tensor.is_meta:  # a runtime's placeholder
            yield tensor.untyped_storage()
