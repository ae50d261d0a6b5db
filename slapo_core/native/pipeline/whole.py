"""Whether a stage's backward pass may come in two parts: what its first forward does decides it."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from slapo_core.native.pipeline.torch_pipelining import recomputes

__all__ = ["Watch"]

_CHECKPOINTED = "a checkpointed function would be computed again for each part"
_COMPILED = "the backward of what is compiled runs once"
_COMPILED_NODE = "CompiledFunctionBackward"
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
        self._name = name
        self._is_over = False
        is_compiled = any(one._compiled_call_impl is not None for one in module.modules())
        self.reason = _COMPILED if is_compiled else ""

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Around a forward; only the first one is looked at. No module is hooked: its graph would be another one."""
        if self._is_over or not torch.is_grad_enabled():
            yield
            return
        if self.reason:  # known already
            yield
        else:
            with _Looking(self):
                yield
        self._is_over = True
        self._tell()

    def look_back(self, roots: Iterable[torch.Tensor]) -> None:
        """Before a backward pass: what the compiler made of a part of a stage shows in the history only."""
        if self.reason or "torch._dynamo" not in sys.modules:
            return
        seen = {one.grad_fn for one in roots if one.grad_fn is not None}
        stack = list(seen)
        while stack:
            node = stack.pop()
            if type(node).__name__ == _COMPILED_NODE:  # its name() may be hidden by an attribute of the function
                self.reason = _COMPILED
                self._tell()
                return
            for below, _ in node.next_functions:
                if below is not None and below not in seen:
                    seen.add(below)
                    stack.append(below)

    def _tell(self) -> None:
        if self.reason:
            warnings.warn(
                f"{self._name} computes the gradients of its inputs and of its weights together, where the schedule "
                f"has them apart, because {self.reason}: they are the same, and the bubbles stay",
                stacklevel=3,
            )


class _Looking(TorchFunctionMode):
    """Notices calls inside of a checkpointed function, and that a tensor on the way gets a hook."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch, self._outside = watch, recomputes()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.register_hook and not args[0].is_leaf:
            self._watch.reason = self._watch.reason or _HOOKED
        if recomputes() != self._outside:
            self._watch.reason = self._watch.reason or _CHECKPOINTED
        return func(*args, **(kwargs or {}))
