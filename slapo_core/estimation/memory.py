"""Which bytes live when: every storage from the operation that makes it until nobody holds it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from slapo_core.errors import EstimateError
from slapo_core.estimation.place import Place
from slapo_core.estimation.private import FakeTensor, is_traceable_wrapper_subclass
from slapo_core.estimation.results import Memory
from slapo_core.graph.session import PATCHING

__all__ = ["MemoryTracker"]

_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)
_KINDS = {
    "forward": "activations",
    "recomputation": "activations",
    "backward": "temporaries",
    "optimizer": "temporaries",
}


class _Held:
    """One storage: its bytes and what they are for; and what tells when it goes."""

    __slots__ = ("kind", "reference", "size")

    def __init__(self, kind: str, size: int) -> None:
        self.kind, self.size = kind, size
        self.reference: Any = None


class MemoryTracker:
    """Counts the bytes of storages by what they are for, and keeps the counts at the peak; an observer.

    Args:
        place: of the step.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._storages: dict[int, _Held] = {}
        self._held: dict[str, int] = {}
        self._total = self._most = 0
        self._peak = self._earlier = Memory()

    @property
    def peak(self) -> Memory:
        """The counts when most bytes were held, in any step; the last such moment of several steps."""
        return self._earlier if self._earlier.total > self._peak.total else self._peak

    @property
    def total(self) -> int:
        """Bytes held now."""
        return self._total

    def begin(self) -> None:
        """Of a training step: it has a peak of its own. In the first one the optimizer's state is not known as such."""
        self._earlier, self._peak, self._most = self.peak, Memory(), 0

    def hold(self, tensors: Iterable[torch.Tensor | None], kind: str) -> None:
        """Count the storages of ``tensors`` as ``kind``, whatever they were counted as."""
        for tensor in tensors:
            if tensor is not None:
                for storage in _storages(tensor):
                    held = self._storages.get(storage._cdata)
                    if held is None:
                        self._add(storage, kind)
                    elif held.kind != kind:
                        self._held[held.kind] -= held.size
                        held.kind = kind
                        self._held[kind] = self._held.get(kind, 0) + held.size
        self._look()

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operation ran: count what it made, or made larger."""
        for leaf in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                for storage in _storages(leaf):
                    held = self._storages.get(storage._cdata)
                    if held is None:
                        self._add(storage, _KINDS[self._place.phase])
                    elif held.size != storage.nbytes():
                        self._change(held, storage.nbytes())
        self._look()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While it lasts, storages that are resized by their own method are noticed; no operation tells of these."""

        def noticed(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            held = self._storages.get(storage._cdata)
            if held is not None:
                self._change(held, storage.nbytes())
                self._look()
            return result

        with PATCHING:
            resize = torch.UntypedStorage.resize_
            torch.UntypedStorage.resize_ = noticed  # type: ignore[method-assign,assignment]
            try:
                yield
            finally:
                torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def _look(self) -> None:
        if self._total > self._most:
            self._most = self._total
            self._peak = Memory(**self._held, module=self._place.module, phase=self._place.phase)

    def _add(self, storage: torch.UntypedStorage, kind: str) -> None:
        key, held = storage._cdata, _Held(kind, storage.nbytes())
        held.reference = weakref.ref(storage, lambda _: self._gone(key, held))
        self._storages[key] = held
        self._held[kind] = self._held.get(kind, 0) + held.size
        self._total += held.size

    def _change(self, held: _Held, size: int) -> None:
        self._held[held.kind] += size - held.size
        self._total += size - held.size
        held.size = size

    def _gone(self, key: int, held: _Held) -> None:
        if self._storages.get(key) is held:  # its address may be another's already
            del self._storages[key]
        self._change(held, 0)


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """Of a tensor, and of what it is made of."""
    if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _storages(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()
    else:
        raise EstimateError(
            f"a tensor of layout {tensor.layout} does not say how much it holds before it has values",
            hint="nn.Embedding(..., sparse=False), or whatever makes it dense",
        )
