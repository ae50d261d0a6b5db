"""One dispatch mode for all that is watched: an operation is seen once, whatever is counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from slapo_core.estimation.communication import wait_operations
from slapo_core.estimation.values import Values

__all__ = ["Observer", "Watch"]


class Observer(Protocol):
    """Counts something of the operations of a step."""

    def begin(self) -> None:
        """Of a training step: what was counted before is not of it."""

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operation ran."""


class Watch(TorchDispatchMode):
    """Runs each operation and tells the observers.

    Args:
        observers: told in this order.
        values: who runs the operations.
    """

    def __init__(self, observers: Sequence[Observer], values: Values) -> None:
        super().__init__()
        self._run = values.run
        self._saw = tuple(observer.saw for observer in observers)
        self._device = torch.ops.prim.device.default
        self._waits = wait_operations()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self._device:  # a question, the most frequent one
            return func(*args)
        if DTensor in types:
            return NotImplemented  # what it does to the tensors of this rank comes by again
        kwargs = kwargs or {}
        # Waiting gives back the tensors that are waited for; without memory torch would make new ones.
        result = args[0] if func in self._waits else self._run(func, args, kwargs)
        for saw in self._saw:
            saw(func, args, kwargs, result)
        return result
