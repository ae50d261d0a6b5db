"""The engine of target ``"megatron"`` for a model that is not cut into stages."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from slapo_core import StepResult
from slapo_core.spec.planning import device_of
from slapo_core.spec.replicas import send_buffers
from slapo_core.spec.unused import UnusedParameters
from slapo_megatron.engine import MegatronEngine
from slapo_megatron.groups.starting import start
from slapo_megatron.marks import mark

if TYPE_CHECKING:
    from slapo_core import Plan
    from slapo_core.spec.request import BuildRequest

__all__ = ["WholeEngine"]

_REPLICAS = ("dp", "cp", "ep")
"""The mesh dimensions whose ranks have other samples."""


class WholeEngine(MegatronEngine):
    """The implementation of :class:`slapo_core.spec.engine.Engine` by Megatron's schedule without a pipeline.

    Args:
        plan: what is built.
        request: from ``build``.
    """

    def __init__(self, plan: Plan, request: BuildRequest) -> None:
        mesh = request.schedule.mesh
        self._lease = start(mesh, device_type=device_of(request.schedule, plan.config["arguments"]["device"]))
        from slapo_megatron.model.assembling import assemble
        from slapo_megatron.model.chunk import Chunk
        from slapo_megatron.model.configuration import transformer_config

        config = transformer_config(plan.config, mesh)
        self._marks = mark(request)
        with self._marks.taken_back_if_it_fails():
            megatron = assemble(plan, request, [Chunk(request.schedule.model, config)], config)
            super().__init__(plan, request, megatron)
        self._count: int = plan.config["microbatches"]
        self._clips = plan.config["optimizer_config"]["clip_grad"] > 0.0
        self._replicas = [mesh.group(dim) for dim in _REPLICAS if mesh is not None and mesh.size(dim) > 1]
        self._unused = UnusedParameters(request, "Megatron", steps_with_zeros=megatron.optimizer is not None)
        self._has_stepped = False

    # -- steps; documented in slapo_core/spec/engine.py ---------------------------------------------------------

    def train_step(self, batch: Any) -> StepResult:
        self._before_step()
        count = None if self._count == self._request.accumulate else self._count  # as the user said it
        pieces = self._request.micro_batches(batch, count, axes=self.plan.config["batch_axes"] or None)
        done = self._passes(pieces)
        is_stepped, norm, _ = self.megatron.optimizer.step()
        if is_stepped:
            self._end_step()
        self._after_step()
        loss = done[0]["loss"] if len(done) == 1 else torch.stack([one["loss"] for one in done]).mean()
        output = done[0]["output"] if len(done) == 1 else None
        return StepResult(loss, output, self._norm(norm, loss.device, is_stepped=is_stepped))

    def eval_step(self, batch: Any) -> StepResult:
        self._require_open()
        with self._request.evaluating(batch):
            loss, output = self._request.compute_loss(batch, self.megatron.chunks[0])
        return StepResult(loss, output)

    def _passes(self, pieces: list[Any]) -> list[dict[str, Any]]:
        """Forward and backward of every micro-batch, and the reduction of the gradients.

        They are accumulated from zero on, whatever an earlier step that failed, or a backward pass of the user's own,
        has left.
        """
        from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

        from slapo_megatron.model.buckets import drop_started

        chunks = self.megatron.chunks
        self._unused.step_begins()
        for group in self._replicas:
            send_buffers(self.module, group)
        drop_started(chunks)
        for chunk in chunks:
            chunk.zero_grad_buffer()
        self.megatron.optimizer.zero_grad()
        try:
            done: list[dict[str, Any]] = forward_backward_no_pipelining(
                forward_step_func=self._forward_step,
                data_iterator=iter(pieces),
                model=chunks,
                num_microbatches=len(pieces),
                seq_length=1,  # of what stages would send
                micro_batch_size=1,
            )
        except BaseException:
            drop_started(chunks)
            raise
        return done

    def _forward_step(self, pieces: Iterator[Any], chunk: Any) -> tuple[torch.Tensor, Any]:
        """What Megatron calls for each micro-batch."""
        loss, output = self._request.compute_loss(next(pieces), chunk)
        return loss, functools.partial(_reduced, output=output)

    def _end_step(self) -> None:
        """After one that Megatron did not skip."""
        if self.megatron.scheduler is not None:
            self.megatron.scheduler.step(1)
        self._unused.step_is_over()
        if not self._has_stepped:
            self._has_stepped = True
            if self._request.optimizer is None:  # the user's tells core that the first step is over
                self.megatron.optimizer.zero_grad()
                self._request.clip_gradients()  # there are none any more

    def _norm(self, norm: float | None, device: torch.device, *, is_stepped: bool) -> torch.Tensor | None:
        """Of all gradients before clipping; infinite in a step that was skipped for an overflow."""
        if not is_stepped:
            return torch.tensor(math.inf, device=device)
        return torch.tensor(norm, device=device) if self._clips and norm is not None else None

    def _release(self) -> None:
        from slapo_megatron.model.releasing import release

        self._unused.stop()
        release(self.megatron, self._marks)


def _reduced(loss: torch.Tensor, output: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The loss for the backward pass, which Megatron divides in place, and what the step gives.

    It is the mean over one thing, the micro-batch: ranks along ``cp`` are replicas. Without that number Megatron takes
    their losses for summands, and multiplies them by how many there are.
    """
    one = torch.ones((), dtype=torch.int, device=loss.device)
    return loss.clone(), one, {"loss": loss.detach().clone(), "output": output}
