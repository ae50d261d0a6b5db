"""Run target ``"megatron"`` for a model that is not divided into stages."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from slapo_core import StepResult
from slapo_megatron.engine import MegatronEngine, Updates
from slapo_megatron.groups.process_groups import start
from slapo_megatron.marks import mark
from slapo_megatron.model.buckets import drop_started
from slapo_runtime.planning import device_of

if TYPE_CHECKING:
    from slapo_core import Plan
    from slapo_runtime.context import BuildContext


class WholeEngine(MegatronEngine):
    """The implementation of :class:`slapo_core.dialect.Engine` by Megatron's schedule without a pipeline.

    Args:
        plan: of the build.
        context: from ``build``.
    """

    def __init__(self, plan: Plan, context: BuildContext) -> None:
        mesh = context.schedule.mesh
        self._lease = start(mesh, device_type=device_of(context.schedule, plan.config["arguments"]["device"]))
        from slapo_megatron.model.assembly import assemble, transformer_config
        from slapo_megatron.model.chunk import Chunk

        config = transformer_config(plan.config, mesh)
        self._marks = mark(context)
        with self._marks.taken_back_if_it_fails():
            megatron = assemble(plan, context, [Chunk(context.schedule.model, config)], config)
            super().__init__(plan, context, megatron)
        self._count: int = plan.config["microbatches"]
        self._updates = Updates(plan, context, megatron)

    # -- steps; documented in slapo_core/engine.py ---------------------------------------------------------

    def train_step(self, batch: Any) -> StepResult:
        self._before_step()
        count = None if self._count == self._context.accumulate else self._count  # as the user said it
        micro_batches = self._context.micro_batches(batch, count, axes=self.plan.config["batch_axes"] or None)
        done = self._passes(micro_batches)
        norm = self._updates.step(done[0]["loss"].device)
        self._after_step()
        loss = done[0]["loss"] if len(done) == 1 else torch.stack([one["loss"] for one in done]).mean()
        output = done[0]["output"] if len(done) == 1 else None
        return StepResult(loss, output, norm)

    def eval_step(self, batch: Any) -> StepResult:
        self._require_open()
        with self._context.evaluating(batch):
            loss, output = self._context.compute_loss(batch, self.megatron.chunks[0])
        return StepResult(loss, output)

    def _passes(self, micro_batches: list[Any]) -> list[dict[str, Any]]:
        """Forward and backward of every micro-batch, and the reduction of the gradients."""
        from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

        chunks = self.megatron.chunks
        self._updates.begin(self.module)
        try:
            done: list[dict[str, Any]] = forward_backward_no_pipelining(
                forward_step_func=self._forward_step,
                data_iterator=iter(micro_batches),
                model=chunks,
                num_microbatches=len(micro_batches),
                seq_length=1,  # of what stages would send
                micro_batch_size=1,
            )
        except BaseException:
            drop_started(chunks)
            raise
        return done

    def _forward_step(self, micro_batches: Iterator[Any], chunk: Any) -> tuple[torch.Tensor, Any]:
        """Run one micro-batch, called by Megatron."""
        loss, output = self._context.compute_loss(next(micro_batches), chunk)
        return loss, functools.partial(_reduced, output=output)

    def _release(self) -> None:
        from slapo_megatron.model.assembly import release

        self._updates.end()
        release(self.megatron, self._marks)


def _reduced(loss: torch.Tensor, output: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return the loss for the backward pass, which Megatron divides in place, and the step's loss.

    It is the mean over one thing, the micro-batch: ranks along ``cp`` are replicas. Without that number Megatron takes
    their losses as partial sums, and multiplies them by their number.
    """
    one = torch.ones((), dtype=torch.int, device=loss.device)
    return loss.clone(), one, {"loss": loss.detach().clone(), "output": output}
