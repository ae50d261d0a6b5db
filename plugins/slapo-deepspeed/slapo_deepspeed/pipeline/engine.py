"""The engine of target ``"deepspeed"`` for a model that is cut into stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slapo_core import BuildError, StepResult
from slapo_deepspeed.engine import DeepSpeedEngine

if TYPE_CHECKING:
    from slapo_core import Plan
    from slapo_core.spec.request import BuildRequest

__all__ = ["PipelineEngine"]


class PipelineEngine(DeepSpeedEngine):
    """The implementation of :class:`slapo_core.spec.engine.Engine` by DeepSpeed's PipelineEngine."""

    def __init__(self, plan: Plan, request: BuildRequest) -> None:
        raise BuildError("target 'deepspeed' does not run pipelines yet")

    def train_step(self, batch: Any) -> StepResult:
        raise NotImplementedError

    def eval_step(self, batch: Any) -> StepResult:
        raise NotImplementedError
