"""The engine of target ``"deepspeed"`` for a model that is cut into stages."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core import StepResult
from slapo_deepspeed.engine import DeepSpeedEngine
from slapo_deepspeed.pipeline.ties import Ties
from slapo_deepspeed.pipeline.work import Form, Work
from slapo_deepspeed.starting import start

if TYPE_CHECKING:
    from slapo_core import Plan
    from slapo_core.spec.request import BuildRequest

__all__ = ["PipelineEngine"]

_KEPT = 16


class PipelineEngine(DeepSpeedEngine):
    """The implementation of :class:`slapo_core.spec.engine.Engine` by DeepSpeed's PipelineEngine.

    Args:
        plan: what is built; ``plan.config["config"]`` is DeepSpeed's configuration, filled in.
        request: from ``build``.
    """

    def __init__(self, plan: Plan, request: BuildRequest) -> None:
        mesh = request.schedule.mesh
        assert mesh is not None
        start(mesh)
        import deepspeed

        from slapo_deepspeed.pipeline.module import StagesModule, topology_of

        for _ in request.materialise():
            pass
        self._mesh, self._axes = mesh, plan.config["batch_axes"] or None
        self._count: int = plan.config["config"]["gradient_accumulation_steps"]
        example = request.staged(request.schedule.example_inputs, 1, training=True, axes=self._axes)
        self._part = request.part(example.staged.partition)
        held = {id(one) for one in self._part.parameters()}
        more = {
            live.name: live.tensor
            for live in request.state.tensors()
            if live.is_here and isinstance(live.tensor, nn.Parameter) and id(live.tensor) not in held
        }
        self._ties = Ties(request, topology_of(mesh))
        self._stages = StagesModule(self._part, more, mesh, self._tied)
        self._ties.mark()
        engine, *_ = deepspeed.initialize(
            model=self._stages, optimizer=request.make_optimizer(), config=dict(plan.config["config"])
        )
        super().__init__(plan, request, engine)
        self._forms: OrderedDict[int, Form] = OrderedDict()
        self._at = "nothing"

    @property
    def module(self) -> nn.Module:
        """This rank's part of the scheduled model."""
        return self._part

    def train_step(self, batch: Any) -> StepResult:
        with self._request.training(batch):
            self._begin(batch, training=True)
            self.deepspeed.train_batch(self._numbers())
        norm = self.deepspeed.get_global_grad_norm() if self.deepspeed.gradient_clipping() else None
        return StepResult(self.deepspeed.dp_group_loss.detach().float(), None, norm)

    def eval_step(self, batch: Any) -> StepResult:
        with self._request.evaluating(batch):
            self._begin(batch, training=False)
            self.deepspeed.eval_batch(self._numbers(), bcast_loss=False)
        loss = torch.zeros((), device=self.deepspeed.device)
        if self.deepspeed.is_last_stage():
            loss += torch.stack(self.deepspeed.fwd_outputs).float().mean()
        torch.distributed.all_reduce(loss, group=self._mesh.group("pp"))
        return StepResult(loss)

    def _begin(self, batch: Any, *, training: bool) -> None:
        cut = self._request.staged(batch, self._count, training=training, axes=self._axes)
        form = self._forms.get(id(cut.staged))
        if form is None:
            form = Form(
                cut.staged, self._request.stage_ranks, self._mesh.rank("pp"), self.deepspeed.device, training=training
            )
            self._forms[id(cut.staged)] = form
            while len(self._forms) > _KEPT:
                self._forms.popitem(last=False)
        self._forms.move_to_end(id(cut.staged))
        self._stages.begin(Work(form, cut, self._stand))
        engine = self.deepspeed
        engine.first_output_send = False
        engine.pipe_recv_buf, engine.grad_layer = form.received, form.gradients

    def _numbers(self) -> Any:
        return iter([(torch.tensor(number), torch.tensor(number)) for number in range(self._count)])

    def _tied(self) -> Any:
        return self._ties.ready(self.deepspeed)

    def _stand(self, what: str) -> None:
        self._at = what
