"""Two training steps of a model without memory: the optimizer's state appears at the end of the first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from slapo_core.building.batches import LossCall
from slapo_core.errors import ArgumentError, EstimateError
from slapo_core.estimation.replicas import Replicas, replicas_of
from slapo_core.estimation.values import Values, seen_as_plain
from slapo_core.estimation.watch import Watch
from slapo_core.private import FakeTensorMode

if TYPE_CHECKING:
    from slapo_core.estimation.child import Request, Trackers
    from slapo_core.schedule.schedule import Schedule

__all__ = ["hold_all", "optimizer_of", "state_of", "train"]


def train(
    schedule: Schedule,
    pieces: list[Any],
    request: Request,
    mode: FakeTensorMode,
    trackers: Trackers,
    values: Values,
) -> None:
    """Run the steps as target ``"torch"`` does; ``trackers`` know what the second needed afterwards.

    Args:
        schedule: of a model with tensors without memory, in training mode.
        pieces: the batch's micro-batches, without memory.
        request: what is asked.
        mode: of the tensors.
        trackers: told of every operation.
        values: who runs the operations.
    """
    model = schedule.model
    place, memory = trackers.place, trackers.memory
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise EstimateError(
            "no parameter of the model requires a gradient: there is no training step to estimate",
            hint="model.requires_grad_(True), or set it on the parameters that are to be trained",
        )
    with mode:
        optimizer = optimizer_of(list(model.parameters()), request)
        hold_all(model, pieces, trackers)
        replicas = replicas_of(model, schedule.mesh, lambda tensors: memory.hold(tensors, "gradients"))
        with place.watching(), memory.watching(), seen_as_plain(), Watch(trackers.observers(), values):
            for _ in range(2):
                trackers.begin_step()
                place.forget()
                _step(model, pieces, request, optimizer, trackers, replicas)
                if optimizer is not None:
                    memory.hold(state_of(optimizer), "optimizer")
    if replicas is not None:
        missing = set(replicas.without_gradients)
        trackers.without_gradients.extend(name for name, each in model.named_parameters() if each in missing)


def hold_all(model: torch.nn.Module, pieces: list[Any], trackers: Trackers) -> None:
    """Count what there is before the first step, and every gradient as such once there is one."""
    memory = trackers.memory
    memory.hold(model.parameters(), "parameters")
    memory.hold(model.buffers(), "buffers")
    memory.hold((leaf for leaf in tree_leaves(pieces) if isinstance(leaf, torch.Tensor)), "inputs")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: memory.hold([p.grad], "gradients"))


def _step(
    model: torch.nn.Module,
    pieces: list[Any],
    request: Request,
    optimizer: torch.optim.Optimizer | None,
    trackers: Trackers,
    replicas: Replicas | None,
) -> None:
    """As ``native/engine.py``: in its order, and holding what it holds."""
    place = trackers.place
    compute_loss = LossCall(model, request.loss)
    losses, output = [], None
    for number, piece in enumerate(pieces):
        place.begin("forward")
        if replicas is not None:
            replicas.before_forward(synchronize=number == len(pieces) - 1)
        loss, output = compute_loss(piece)
        if number == 0:
            for parameter in model.parameters():
                parameter.grad = None
        place.begin("backward")
        (loss / len(pieces) if len(pieces) > 1 else loss).backward()
        losses.append(loss.detach())
    place.begin("optimizer")
    if optimizer is not None:
        optimizer.step()
    del loss, output, losses


def optimizer_of(parameters: list[torch.nn.Parameter], request: Request) -> torch.optim.Optimizer | None:
    """What the request's factory makes of parameters."""
    if request.optimizer is None:
        return None
    optimizer = request.optimizer(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            f"the optimizer factory must return a torch.optim.Optimizer (got {type(optimizer).__name__})",
            hint="estimate(sch, batch, optimizer=functools.partial(torch.optim.AdamW, lr=1e-4))",
        )
    return optimizer


def state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Its tensors."""
    return [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, torch.Tensor)]
