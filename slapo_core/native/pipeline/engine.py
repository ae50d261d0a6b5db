"""The engine of target ``"torch"`` for a model that is cut into stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo_core import BuildError, StepResult
from slapo_core.native.pipeline.forms import Forms
from slapo_core.native.pipeline.outputs import gather_output
from slapo_core.native.pipeline.replicas import average_gradients
from slapo_core.native.pipeline.runtime import PipelineRuntime
from slapo_core.native.pipeline.schedules import schedule_of
from slapo_core.spec.drawing import move_on, own_random_state
from slapo_core.spec.stateful import StatefulEngine

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from slapo_core import Plan
    from slapo_core.native.pipeline.stage import Work
    from slapo_core.spec.request import BuildRequest

__all__ = ["PipelineEngine"]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class PipelineEngine(StatefulEngine):
    """The implementation of :class:`slapo_core.spec.engine.Engine` by torch.distributed.pipelining.

    Every rank is given the whole batch of its replica, and has the replica's loss. After a step that failed the engine
    is closed.

    Args:
        plan: what is built; ``plan.config`` holds the options of the pipeline.
        request: from ``build``.
    """

    def __init__(self, plan: Plan, request: BuildRequest) -> None:
        mesh = request.schedule.mesh
        assert mesh is not None
        if request.accumulate > 1:
            raise BuildError(
                f"a pipeline accumulates gradients over its micro-batches (got accumulate={request.accumulate})",
                hint=f"microbatches={request.accumulate * plan.config['microbatches']}, and no accumulate",
            )
        self.plan, self._request, self._mesh = plan, request, mesh
        self._state = request.state
        self.optimizer = request.make_optimizer()
        self._ranks, self._rank = request.stage_ranks, mesh.rank("pp")
        self._count: int = plan.config["microbatches"]
        here = [live for live in self._state.tensors() if live.is_here]
        self._parameters = [live.tensor for live in here if live.is_parameter]
        self._device = request.device or next((live.tensor.device for live in here), torch.device("cpu"))
        schedule = schedule_of(plan.config, len(self._ranks), mesh.size("pp"))
        self._forms = Forms(request, schedule, mesh.group("pp"), self._device, plan.config)
        self._part: nn.Module | None = None
        self._at = "nothing"  # of a step, for the message of an error

    @property
    def module(self) -> nn.Module:
        """This rank's part of the scheduled model; made when it is first asked for."""
        if self._part is None:
            self._part = self._request.part(self._forms.any_partition())
        return self._part

    @property
    def torch(self) -> PipelineRuntime:
        """The pieces of a training step, for loops written by hand.

        Raises:
            BuildError: the engine is closed.
        """
        self._require_open()
        return PipelineRuntime(self._passes, self._request.clip_gradients, self._forms)

    # -- steps; documented in spec/engine.py ------------------------------------------------------------------

    def train_step(self, batch: Any) -> StepResult:
        self._require_open()
        if self.optimizer is None:
            raise self._without_optimizer()
        loss = self._passes(batch, zero=self.optimizer)
        with self._closing(lambda: self._at):
            self._at = "clipping gradients"
            norm = self._request.clip_gradients()
            self._at = "the step of the optimizer"
            self.optimizer.step()
        return StepResult(loss, None, norm)

    def eval_step(self, batch: Any, *, gather_outputs: bool = False) -> StepResult:
        """Forward only, of all micro-batches.

        Args:
            batch: the whole one, as for ``train_step``.
            gather_outputs: give the output for the whole batch, on every rank.
        """
        self._require_open()
        with self._request.evaluating(batch):
            cut, form = self._forms.of(batch, training=False)
            whole = self._forms.whole(batch, form) if gather_outputs else form.staged.partition
            with self._closing(lambda: self._at):
                work = form.run(cut, backward=False, keep_outputs=gather_outputs, at=self._stand)
                loss, output, problem = self._loss(work), None, ""
                if gather_outputs:
                    self._at = "gathering the output"
                    output, problem = gather_output(
                        form.staged.partition,
                        whole,
                        work,
                        self._ranks,
                        self._rank,
                        self._mesh.group("pp"),
                        device=self._device,
                        count=self._count,
                    )
        if problem:
            raise BuildError(problem, hint="eval_step(batch) without gather_outputs")
        return StepResult(loss, output)

    def _passes(self, batch: Any, *, zero: Optimizer | None = None) -> Tensor:
        """Forward and backward of all micro-batches; gradients are those of the batch of all replicas then."""
        self._require_open()
        self._refuse_without_gradients()
        with self._request.training(batch):
            cut, form = self._forms.of(batch, training=True)
            with self._closing(lambda: self._at):
                if zero is not None:
                    zero.zero_grad(set_to_none=True)
                earlier = [(one, one.grad) for one in self._trained() if one.grad is not None]
                for parameter, _ in earlier:
                    parameter.grad = None  # which is exchanged already
                with own_random_state(self._device) as seed:
                    work = form.run(cut, backward=True, seed=seed, at=self._stand)
                loss = self._loss(work)
                self._at = "summing gradients"
                replicas = self._mesh.group("dp")
                if replicas is not None:
                    average_gradients(self._trained(), replicas, bucket_bytes=self.plan.config["bucket_cap_mb"] << 20)
                self._request.sum_tied_gradients()
                for parameter, gradient in earlier:
                    parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        return loss

    def _trained(self) -> list[Tensor]:
        return [parameter for parameter in self._parameters if parameter.requires_grad]

    def _loss(self, work: Work) -> Tensor:
        """The mean over the micro-batches, on every rank of the replica; all of them move on in torch's stream."""
        self._at = "exchanging the loss"
        message = torch.zeros(3, dtype=torch.float64, device=self._device)
        message[2] = work.drew
        if self._ranks[-1] == self._rank:
            own = torch.stack([work.losses[number] for number in range(self._count)]).mean()
            message[0], message[1] = own, _DTYPES.index(own.dtype)
        dist.all_reduce(message, group=self._mesh.group("pp"))
        loss, kind, drew = message.unbind()
        if drew:
            move_on()
        return loss.to(_DTYPES[int(kind)])

    # -- the end ----------------------------------------------------------------------------------------------

    def _stand(self, what: str) -> None:
        self._at = what

    def close(self) -> None:
        """Let go of the optimizer and the stages; the model and its state stay."""
        if self._reason is None:
            self._reason = ""
        self._forms.close()
        self.optimizer = None

    def _require_open(self) -> None:
        if self._reason is not None:
            raise self._closed(self._reason)
