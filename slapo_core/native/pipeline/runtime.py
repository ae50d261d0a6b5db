"""What hangs on ``engine.torch`` of a pipeline: the pieces of a training step, for loops written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from slapo_core.native.pipeline.forms import Forms

__all__ = ["PipelineRuntime"]


class PipelineRuntime:
    """The runtime of a pipeline of target ``"torch"``.

    A step by hand, with the gradients of several batches::

        for batch in batches:
            loss = engine.torch.forward_backward(batch)
        engine.torch.clip_gradients()
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    Attributes:
        forward_backward: all micro-batches of a batch forward and backward: gives their mean loss, and adds its
            gradients, averaged over replicas and summed over ties, to those that are there. A collective.
        clip_gradients: scales all gradients to ``max_grad_norm``, a collective; gives the norm, or None without one.
    """

    def __init__(
        self,
        forward_backward: Callable[[Any], torch.Tensor],
        clip_gradients: Callable[[], torch.Tensor | None],
        forms: Forms,
    ) -> None:
        self.forward_backward = forward_backward
        self.clip_gradients = clip_gradients
        self._forms = forms

    def sent_bytes(self) -> dict[int, tuple[int, int]]:
        """What the stages of this rank have sent to other ranks: by stage, to the next one and to the one before it."""
        return self._forms.sent_bytes()
