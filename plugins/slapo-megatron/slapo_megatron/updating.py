"""What both engines do before the passes of a training step, and after them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from slapo_core.spec.flat_shards import send_buffers
from slapo_core.spec.step_invariants import UnusedParameters
from slapo_megatron.model.buckets import drop_started

if TYPE_CHECKING:
    from torch import nn

    from slapo_core import Plan
    from slapo_core.spec.request import BuildRequest
    from slapo_megatron.runtime import Megatron

__all__ = ["Updates"]


class Updates:
    """The steps of Megatron's optimizer and scheduler.

    Args:
        plan: what is built.
        request: from ``build``.
        megatron: its objects.
    """

    def __init__(self, plan: Plan, request: BuildRequest, megatron: Megatron) -> None:
        mesh = request.schedule.mesh
        self._request, self._megatron = request, megatron
        self._clips = plan.config["optimizer_config"]["clip_grad"] > 0.0
        self._replicas = mesh.group("dp") if mesh is not None and mesh.size("dp") > 1 else None
        self._unused = UnusedParameters(request, "Megatron", steps_with_zeros=megatron.optimizer is not None)
        self._has_stepped = False

    def begin(self, module: nn.Module) -> None:
        """Before the passes.

        Gradients are accumulated from zero on, whatever an earlier step that failed, or a backward pass of the user's
        own, has left.

        Args:
            module: of whose buffers replicas hold the same.
        """
        self._unused.step_begins()
        send_buffers(module, self._replicas)
        drop_started(self._megatron.chunks)
        for chunk in self._megatron.chunks:
            chunk.zero_grad_buffer()
        self._megatron.optimizer.zero_grad()

    def seen(self, parameters: Iterable[nn.Parameter]) -> None:
        """Parameters that have a gradient, whether or not a pass on this rank gave them one."""
        for parameter in parameters:
            self._unused.seen(parameter)

    def step(self, device: torch.device) -> torch.Tensor | None:
        """After them.

        Returns:
            the norm of all gradients before clipping, where they are clipped; infinite in a step that Megatron skipped
            for an overflow.
        """
        is_stepped, norm, _ = self._megatron.optimizer.step()
        if not is_stepped:
            return torch.tensor(math.inf, device=device)
        if self._megatron.scheduler is not None:
            self._megatron.scheduler.step(1)
        self._unused.step_is_over()
        if not self._has_stepped:
            self._has_stepped = True
            if self._request.optimizer is None:  # the user's tells core that the first step is over
                self._megatron.optimizer.zero_grad()
                self._request.clip_gradients()  # there are none any more
        return torch.tensor(norm, device=device) if self._clips and norm is not None else None

    def end(self) -> None:
        """Stop to watch parameters."""
        self._unused.stop()
