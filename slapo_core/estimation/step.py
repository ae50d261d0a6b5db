"""Two training steps of a model without memory: the optimiser's state appears in the second."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from slapo_core.building.loss import LossCall
from slapo_core.estimation.memory import MemoryTracker
from slapo_core.estimation.private import FakeTensorMode

if TYPE_CHECKING:
    from slapo_core.estimation.child import Request

__all__ = ["train"]


def train(model: torch.nn.Module, batch: Any, request: Request, mode: FakeTensorMode, memory: MemoryTracker) -> None:
    """Run the steps; ``memory`` knows the peak of the second afterwards."""
    compute_loss = LossCall(model, request.loss)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.train()
    with mode:
        optimizer = request.optimizer(parameters) if request.optimizer is not None else None
        memory.hold(model.parameters(), "parameters")
        memory.hold(model.buffers(), "buffers")
        memory.hold((leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)), "inputs")
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda p: memory.hold([p.grad], "gradients"))
        with memory:
            for _ in range(2):
                memory.phase = "forward"
                loss, output = compute_loss(batch)
                if optimizer is not None:
                    optimizer.zero_grad(set_to_none=True)
                memory.phase = "backward"
                loss.backward()
                memory.phase = "optimizer"
                if optimizer is not None:
                    optimizer.step()
                del loss, output
