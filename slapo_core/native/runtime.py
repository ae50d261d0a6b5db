"""What hangs on ``engine.torch``: the pieces of a training step, for loops written by hand."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["TorchRuntime"]


class TorchRuntime:
    """The runtime of target ``"torch"``.

    A step by hand, with gradients accumulated over ``pieces``::

        for number, piece in enumerate(pieces, start=1):
            with engine.torch.no_sync() if number < len(pieces) else contextlib.nullcontext():
                (engine.torch.module(**piece).loss / len(pieces)).backward()
        engine.torch.clip_gradients()
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    Attributes:
        module: what a training step calls: DistributedDataParallel around ``engine.module`` where the mesh has several
            replicas (``dp``), else ``engine.module`` itself. Gradients of a backward pass through ``engine.module``
            are those of this rank's own samples.
        clip_gradients: scales all gradients to ``max_grad_norm``, a collective; gives the norm, or None without one.
    """

    def __init__(self, module: nn.Module, clip_gradients: Callable[[], torch.Tensor | None]) -> None:
        self.module = module
        self.clip_gradients = clip_gradients
        self._handles: list[Any] = []
        self._is_averaged = False

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Around forward and backward of every micro-batch but the last one: replicas do not exchange gradients yet."""
        if isinstance(self.module, DistributedDataParallel):
            return self.module.no_sync()  # type: ignore[no-any-return]
        return contextlib.nullcontext()

    def watch(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Warn of an optimizer step on gradients that replicas have not exchanged."""
        if optimizer is None or not isinstance(self.module, DistributedDataParallel):
            return
        self._handles = [
            self.module.register_forward_pre_hook(self._forwarded),
            optimizer.register_step_pre_hook(self._stepping),
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _forwarded(self, module: nn.Module, _: Any) -> None:
        self._is_averaged = self._is_averaged or bool(module.require_backward_grad_sync)

    def _stepping(self, *_: Any) -> None:
        if not self._is_averaged:
            warnings.warn(
                "the optimizer steps, and no backward pass since its last step went through engine.torch.module "
                "outside of no_sync(): unless you average the gradients yourself, replicas (dp) part here; call "
                "engine.torch.module(...) instead of engine.module(...), or engine.train_step(batch)",
                stacklevel=4,
            )
        self._is_averaged = False
