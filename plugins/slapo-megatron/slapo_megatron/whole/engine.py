"""The engine of target ``"megatron"`` for a model that is not cut into stages."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from slapo_core import StepResult
from slapo_megatron.engine import MegatronEngine
from slapo_megatron.groups.starting import start
from slapo_megatron.marks import mark

if TYPE_CHECKING:
    from slapo_core import Plan
    from slapo_core.spec.request import BuildRequest

__all__ = ["WholeEngine"]


class WholeEngine(MegatronEngine):
    """The implementation of :class:`slapo_core.spec.engine.Engine` by Megatron's schedule without a pipeline.

    Args:
        plan: what is built.
        request: from ``build``.
    """

    def __init__(self, plan: Plan, request: BuildRequest) -> None:
        mesh = request.schedule.mesh
        start(mesh)
        from slapo_megatron.model.assembling import assemble
        from slapo_megatron.model.chunk import Chunk
        from slapo_megatron.model.configuration import transformer_config

        mark(request)
        config = transformer_config(plan.config, mesh)
        super().__init__(plan, request, assemble(plan, request, [Chunk(request.schedule.model, config)], config))
        self._count: int = plan.config["microbatches"]

    # -- steps; documented in slapo_core/spec/engine.py ---------------------------------------------------------

    def train_step(self, batch: Any) -> StepResult:
        self._require_open()
        optimizer = self.megatron.optimizer
        if optimizer is None:
            raise self._without_optimizer()
        self._refuse_without_gradients()
        from megatron.core.pipeline_parallel import get_forward_backward_func

        pieces = self._request.micro_batches(batch, self._count, axes=self.plan.config["batch_axes"] or None)
        for chunk in self.megatron.chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        done = get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=iter(pieces),
            model=self.megatron.chunks,
            num_microbatches=len(pieces),
            seq_length=1,
            micro_batch_size=1,
        )
        _, norm, _ = optimizer.step()
        if self.megatron.scheduler is not None:
            self.megatron.scheduler.step(1)
        loss = torch.stack([one["loss"] for one in done]).mean()
        output = done[0]["output"] if len(done) == 1 else None
        return StepResult(loss, output, None if norm is None else torch.tensor(norm))

    def eval_step(self, batch: Any) -> StepResult:
        self._require_open()
        with self._request.evaluating(batch):
            loss, output = self._request.compute_loss(batch, self.megatron.chunks[0])
        return StepResult(loss, output)

    def _forward_step(self, pieces: Iterator[Any], chunk: Any) -> tuple[torch.Tensor, Any]:
        """What Megatron calls for each micro-batch."""
        loss, output = self._request.compute_loss(next(pieces), chunk)
        return loss, functools.partial(_reduced, output=output)


def _reduced(loss: torch.Tensor, output: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """The loss for the backward pass, which Megatron divides in place, and what the step gives."""
    return loss.clone(), {"loss": loss.detach().clone(), "output": output}
