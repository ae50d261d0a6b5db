"""Whether a stage's backward pass may come in two parts: what its first forward does decides it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from slapo_core.native.pipeline.torch_pipelining import recomputes

__all__ = ["Watch"]

_CHECKPOINTED = "a checkpointed function would be computed again for each part"
_HOOKED = "a hook of a tensor would run in both parts"


class Watch:
    """Looks at the first forward of a stage with gradients, and warns where its backward must not be parted.

    Args:
        module: of the stage.
        name: for the warning.

    Attributes:
        reason: why the backward must not be parted; "" if nothing speaks against it.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = module, name
        self._is_over = False
        self.reason = ""

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Around a forward; only the first one is looked at."""
        if self._is_over or not torch.is_grad_enabled():
            yield
            return
        outside = recomputes()

        def entered(*_: Any) -> None:
            if recomputes() != outside:
                self.reason = self.reason or _CHECKPOINTED

        handles = [module.register_forward_pre_hook(entered) for module in self._module.modules()]
        try:
            with _Hooks(self):
                yield
        finally:
            for handle in handles:
                handle.remove()
        self._is_over = True
        if self.reason:
            warnings.warn(
                f"{self._name} computes the gradients of its inputs and of its weights together, where the schedule "
                f"has them apart, because {self.reason}: they are the same, and the bubbles stay",
                stacklevel=2,
            )


class _Hooks(TorchFunctionMode):
    """Notices that a tensor on the way gets a hook."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.register_hook and not args[0].is_leaf:
            self._watch.reason = self._watch.reason or _HOOKED
        return func(*args, **(kwargs or {}))
