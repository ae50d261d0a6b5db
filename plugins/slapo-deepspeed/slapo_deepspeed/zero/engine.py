"""The engine of target ``"deepspeed"`` for a model that is not cut into stages."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from slapo_core import StepResult
from slapo_deepspeed.engine import DeepSpeedEngine
from slapo_deepspeed.grad_norm_marks import keep_norm, mark, marks_taken_back, norm_of_last_step, require_counted
from slapo_deepspeed.initialization import has_optimizer, initialize
from slapo_deepspeed.process_groups import MeshUnit, start
from slapo_deepspeed.zero.failed_step import Failing
from slapo_deepspeed.zero.gradients import forget_gradients, last_micro_batch, unused_parameters
from slapo_deepspeed.zero.partitioning import Partitioning, is_partitioned, returned_at_once
from slapo_deepspeed.zero.zero3_gather import gather_whole, linear_of_torch, partitioned_linear
from slapo_runtime.flat_shards import send_buffers

if TYPE_CHECKING:
    from slapo_core import Plan
    from slapo_runtime.context import BuildContext


class ZeroEngine(DeepSpeedEngine):
    """The implementation of :class:`slapo_core.dialect.Engine` by DeepSpeed's engine.

    Args:
        plan: of the build; ``plan.config["config"]`` is DeepSpeed's completed configuration.
        context: from ``build``.
    """

    def __init__(self, plan: Plan, context: BuildContext) -> None:
        mesh = context.schedule.mesh
        start(mesh)
        self._config = plan.config["config"]
        self._trains = has_optimizer(plan, context)
        self._unit = MeshUnit(mesh)
        self._replicas = mesh.group("dp") if mesh is not None else None
        self._has_stepped = False
        with linear_of_torch(), returned_at_once() if is_partitioned(self._config) else contextlib.nullcontext():
            engine, groups = self._made(plan, context, self._unit)
        keep_norm(engine)
        gather_whole(context, engine)
        super().__init__(plan, context, engine, groups)
        self._failing = Failing(engine)
        self._unused = unused_parameters(context, engine)

    @staticmethod
    def _made(plan: Plan, context: BuildContext, unit: MeshUnit) -> tuple[Any, Any]:
        """DeepSpeed's engine of the model with its values, and the groups of its optimizer."""
        partitioning = Partitioning(context, plan.config["config"], unit)
        try:
            partitioning.run()
            with marks_taken_back(context):
                marked = mark(context)
                made = initialize(plan, context, context.schedule.model, mpu=unit)
                require_counted(made[0], marked)
        except BaseException:
            partitioning.take_back()
            raise
        partitioning.keep()
        return made

    # -- steps; documented in slapo_core/engine.py ---------------------------------------------------------

    def train_step(self, batch: Any) -> StepResult:
        self._require_open()
        if not self._trains:
            raise self._without_optimizer()
        self._refuse_without_gradients()
        self._failing.refuse_after()
        self._between.check()
        self._between.check_boundary()
        micro_batches = self._micro_batches(batch)
        losses, output = [], None
        with self._failing.watched(), partitioned_linear(self._config):
            send_buffers(self.module, self._replicas)
            forget_gradients(self.deepspeed)
            for number, micro_batch in enumerate(micro_batches, start=1):
                loss, output = self._context.compute_loss(micro_batch, self.deepspeed)
                self._failing.backward_begins()
                with last_micro_batch(self.deepspeed) if number == len(micro_batches) > 1 else contextlib.nullcontext():
                    self.deepspeed.backward(loss)
                self.deepspeed.step()
                losses.append(loss.detach())
        self._between.note()
        self._unused.step_is_over()
        if not self._has_stepped:
            self._end_first_step()
        loss, output = (losses[0], output) if len(micro_batches) == 1 else (torch.stack(losses).mean(), None)
        norm = norm_of_last_step(self.deepspeed) if self._config.get("gradient_clipping") else None
        return StepResult(loss, output, norm)

    def eval_step(self, batch: Any) -> StepResult:
        self._require_open()
        with self._context.evaluating(batch), partitioned_linear(self._config):
            loss, output = self._context.compute_loss(batch, self.deepspeed)
        return StepResult(loss, output)

    def _micro_batches(self, batch: Any) -> list[Any]:
        """The micro-batches of a step, as many as DeepSpeed accumulates."""
        count = self._config.get("gradient_accumulation_steps", 1)
        axes = self.plan.config.get("batch_axes") or None
        return self._context.micro_batches(batch, None if count == self._context.accumulate else count, axes=axes)

    def _end_first_step(self) -> None:
        """The user's optimizer tells core that the first step is over; DeepSpeed's own cannot."""
        self._has_stepped = True
        if self._context.optimizer is None:
            self._context.clip_gradients()  # there are none any more

    def _release(self) -> None:
        self._unused.stop()
        self._unit.forget()
