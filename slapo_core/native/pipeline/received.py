"""A value that came from another stage, and the gradient that goes back for it."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Received"]


class Received:
    """One value of one micro-batch.

    What the stage's module reads is no leaf, so it may write to it; and no copy. Its gradient, of all that uses it, is
    kept here instead of going into a leaf: of the stage's own uses, of later writes to it, and of what comes back for
    it from behind where it is relayed.

    Args:
        buffer: what came; nobody else uses it.
        carries_gradient: whether one is wanted.
    """

    def __init__(self, buffer: torch.Tensor, *, carries_gradient: bool) -> None:
        self.gradient: torch.Tensor | None = None
        self._like = (buffer.shape, buffer.dtype, buffer.device)
        self.start: torch.Tensor | None = None
        if carries_gradient and torch.is_grad_enabled():
            self.start = torch.empty(0, device=buffer.device, requires_grad=True)
            buffer = _Arrival.apply(self.start, [buffer], self)  # type: ignore[no-untyped-call]
        self._tensor: torch.Tensor | None = buffer

    def take(self) -> torch.Tensor:
        """What the stage reads; once: its history leads here, and would keep itself alive."""
        tensor, self._tensor = self._tensor, None
        assert tensor is not None
        return tensor

    def give_back(self) -> torch.Tensor:
        """The gradient, contiguous; zeros where nothing used the value."""
        gradient, self.gradient = self.gradient, None
        if gradient is None:
            shape, dtype, device = self._like
            return torch.zeros(shape, dtype=dtype, device=device)
        return gradient.contiguous()


class _Arrival(torch.autograd.Function):
    """Makes of a buffer a tensor with a history, which begins here."""

    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, buffer: list[torch.Tensor], received: Received) -> torch.Tensor:
        ctx.received = received
        return buffer.pop()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        received = ctx.received
        received.gradient = gradient if received.gradient is None else received.gradient + gradient
        return None, None, None
