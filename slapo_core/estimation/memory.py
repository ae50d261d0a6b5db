"""Which bytes live when: every storage from the operation that makes it until nobody holds it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slapo_core.estimation.results import Memory

__all__ = ["MemoryTracker"]


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of storages by what they are for, and keeps the counts at the peak.

    Attributes:
        phase: ``"forward"``, ``"backward"`` or ``"optimizer"``; the step says so.
        peak: the counts when most bytes were held.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = "forward"
        self.peak = Memory()
        self._sizes: dict[int, tuple[str, int]] = {}
        self._held: dict[str, int] = {}
        self._total = 0
        self._alive: list[Any] = []

    def hold(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Count the storages of ``tensors`` as ``kind``, whatever they were counted as."""
        for tensor in tensors:
            self._count(tensor.untyped_storage(), kind)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        kind = "activations" if self.phase == "forward" else "optimizer" if self.phase == "optimizer" else "temporaries"
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._sizes:
                    self._count(storage, kind)
        if self._total > self.peak.total:
            self.peak = replace(Memory(phase=self.phase), **self._held)
        return result

    def _count(self, storage: torch.UntypedStorage, kind: str) -> None:
        key = storage._cdata
        if key in self._sizes:
            old, size = self._sizes[key]
            self._held[old] -= size
        else:
            size = storage.nbytes()
            weakref.finalize(storage, self._gone, key)
            self._total += size
        self._sizes[key] = (kind, size)
        self._held[kind] = self._held.get(kind, 0) + size

    def _gone(self, key: int) -> None:
        kind, size = self._sizes.pop(key)
        self._held[kind] -= size
        self._total -= size
