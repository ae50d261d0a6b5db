"""The engine of target ``"deepspeed"`` for a model that is not cut into stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from slapo_core import StepResult
from slapo_deepspeed.engine import DeepSpeedEngine
from slapo_deepspeed.starting import start

if TYPE_CHECKING:
    from slapo_core import Plan
    from slapo_core.spec.request import BuildRequest

__all__ = ["ZeroEngine"]


class ZeroEngine(DeepSpeedEngine):
    """The implementation of :class:`slapo_core.spec.engine.Engine` by DeepSpeed's engine."""

    def __init__(self, plan: Plan, request: BuildRequest) -> None:
        start(request.schedule.mesh)
        import deepspeed

        for _ in request.materialise():
            pass
        engine, *_ = deepspeed.initialize(
            model=request.schedule.model, optimizer=request.make_optimizer(), config=dict(plan.config["config"])
        )
        super().__init__(plan, request, engine)

    def train_step(self, batch: Any) -> StepResult:
        pieces = self._request.micro_batches(batch)
        losses, output = [], None
        for piece in pieces:
            loss, output = self._request.compute_loss(piece, self.deepspeed)
            self.deepspeed.backward(loss)
            self.deepspeed.step()
            losses.append(loss.detach())
        return StepResult(torch.stack(losses).mean(), output if len(pieces) == 1 else None)

    def eval_step(self, batch: Any) -> StepResult:
        loss, output = self._request.evaluate(batch)
        return StepResult(loss, output)
