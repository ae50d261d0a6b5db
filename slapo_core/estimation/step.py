"""Two training steps of a model without memory: the optimiser's state appears in the first one's end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from slapo_core.building.loss import LossCall
from slapo_core.estimation.private import FakeTensorMode
from slapo_core.estimation.values import Values, seen_as_plain
from slapo_core.estimation.watch import Watch

if TYPE_CHECKING:
    from slapo_core.estimation.child import Request, Trackers

__all__ = ["train"]


def train(
    model: torch.nn.Module, batch: Any, request: Request, mode: FakeTensorMode, trackers: Trackers, values: Values
) -> None:
    """Run the steps; ``trackers`` know what the second needed afterwards."""
    compute_loss = LossCall(model, request.loss)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    place, memory = trackers.place, trackers.memory
    model.train()
    with mode:
        optimizer = request.optimizer(parameters) if request.optimizer is not None else None
        memory.hold(model.parameters(), "parameters")
        memory.hold(model.buffers(), "buffers")
        memory.hold((leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)), "inputs")
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda p: memory.hold([p.grad], "gradients"))
        with place.watching(), seen_as_plain(), Watch(trackers.observers(), values):
            for _ in range(2):
                trackers.begin_step()
                place.forget()
                place.begin("forward")
                loss, output = compute_loss(batch)
                if optimizer is not None:
                    optimizer.zero_grad(set_to_none=True)
                place.begin("backward")
                loss.backward()
                place.begin("optimizer")
                if optimizer is not None:
                    optimizer.step()
                    memory.hold(_state(optimizer), "optimizer")
                del loss, output


def _state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, torch.Tensor)]
