"""The engine of target ``"megatron"`` for a model that is cut into stages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core import BuildError, RankFailedError, StepResult
from slapo_core.spec.batch_forms import Forms
from slapo_core.spec.drawing import move_on, own_random_state
from slapo_core.spec.stage_work import Form, Work
from slapo_megatron.engine import MegatronEngine
from slapo_megatron.groups.starting import start
from slapo_megatron.marks import mark

if TYPE_CHECKING:
    from slapo_core import Plan
    from slapo_core.spec.request import BuildRequest, StagedModel
    from slapo_megatron.runtime import Megatron

__all__ = ["PipelineEngine"]


class PipelineEngine(MegatronEngine):
    """The implementation of :class:`slapo_core.spec.engine.Engine` by Megatron's 1F1B and interleaved schedules.

    Every rank is given the whole batch of its replica, and has the replica's loss. After a step that failed on any rank
    the engine is closed on all of them.

    Args:
        plan: what is built.
        request: from ``build``.
    """

    def __init__(self, plan: Plan, request: BuildRequest) -> None:
        mesh = request.schedule.mesh
        assert mesh is not None
        self._mesh = mesh
        self._at = "nothing"  # of a step, for the message of an error
        self._reason: str | None = None  # why it is closed
        self._count: int = plan.config["microbatches"]
        axes = plan.config["batch_axes"] or None
        here = [live for live in request.state.tensors() if live.is_here]
        self._device = request.device or next((live.tensor.device for live in here), torch.device("cpu"))
        start(mesh)
        self._groups = request.own_groups("pp")
        mark(request)
        partition = request.staged_example(self._count, axes=axes).staged.partition
        self._part = request.part(partition)
        own = {one.index: one.module for one in partition.stages if request.stage_ranks[one.index] == mesh.rank("pp")}
        held = {id(one) for one in self._part.parameters()}
        unused = {live.name: live.tensor for live in here if isinstance(live.tensor, nn.Parameter)}
        unused = {name: one for name, one in unused.items() if id(one) not in held}
        super().__init__(plan, request, self._assembled(plan, request, own, unused))

        from slapo_megatron.pipeline.running import Schedule

        on_cpu = self._device.type == "cpu"
        self._schedule = Schedule(self.megatron, self._groups.group("pp") if on_cpu else None)
        self._forms = Forms(request, self._count, axes, "microbatches", self._form)

    def _assembled(
        self, plan: Plan, request: BuildRequest, own: dict[int, nn.Module], unused: dict[str, nn.Parameter]
    ) -> Megatron:
        from slapo_megatron.model.assembling import assemble
        from slapo_megatron.model.configuration import transformer_config
        from slapo_megatron.pipeline.chunk import chunks_of

        config = transformer_config(plan.config, self._mesh)
        config.virtual_pipeline_model_parallel_size = len(own) if len(own) > 1 else None
        chunks = chunks_of(own, unused, len(request.stage_ranks), config)
        megatron = assemble(plan, request, chunks, config, sum_ties=lambda: request.sum_tied_gradients("main_grad"))
        finalise = config.finalize_model_grads_func

        def after_all(*args: Any, **kwargs: Any) -> None:
            self._at = "Megatron's exchange of gradients, or its optimizer's step"
            self._wait_for_all()
            finalise(*args, **kwargs)

        config.finalize_model_grads_func = after_all
        return megatron

    def _form(self, staged: StagedModel, training: bool) -> Form:
        ranks, rank = self._request.stage_ranks, self._mesh.rank("pp")
        return Form(staged, ranks, rank, self._device, training=training, joined=True)

    @property
    def module(self) -> nn.Module:
        """This rank's part of the scheduled model."""
        return self._part

    # -- steps; documented in slapo_core/spec/engine.py ---------------------------------------------------------

    def train_step(self, batch: Any) -> StepResult:
        self._require_open()
        optimizer = self.megatron.optimizer
        if optimizer is None:
            raise self._without_optimizer()
        self._refuse_without_gradients()
        with self._request.training(batch), self._step():
            form, works = self._works(batch, training=True)
            for chunk in self.megatron.chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            with own_random_state(self._device) as seed:
                for work in works:
                    work.seed = seed
                losses = self._schedule.run(form, works, self._count, backward=True)
            _, norm, _ = optimizer.step()
            if self.megatron.scheduler is not None:
                self.megatron.scheduler.step(1)
            loss = self._loss(form, works, losses)
        return StepResult(loss, None, None if norm is None else torch.tensor(norm))

    def eval_step(self, batch: Any) -> StepResult:
        self._require_open()
        with self._request.evaluating(batch), self._step():
            form, works = self._works(batch, training=False)
            losses = self._schedule.run(form, works, self._count, backward=False)
            return StepResult(self._loss(form, works, losses))

    def _works(self, batch: Any, *, training: bool) -> tuple[Form, list[Work]]:
        with self._groups.together("preparing the step", self._device):
            cut, form = self._forms.of(batch, training=training)
        return form, [Work(form, leg, cut, self._stand) for leg in form.legs]

    def _loss(self, form: Form, works: Sequence[Work], losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """The mean over the micro-batches, on every rank of the replica; all of them move on in torch's stream."""
        self._at = "exchanging the loss"
        message = torch.zeros(2, dtype=torch.float64, device=self._device)
        message[1] = any(work.drew for work in works)
        if losses:
            message[0] = torch.stack(list(losses)).mean()
        self._groups.group("pp").allreduce([message]).wait()
        loss, drew = message.unbind()
        if drew:
            move_on()
        return loss.to(form.loss_dtype)

    def _wait_for_all(self) -> None:
        self._groups.group().allreduce([torch.zeros(1, device=self._device)]).wait()

    # -- the end ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        try:
            with self._groups.step(lambda: self._at):
                yield
        except RankFailedError as error:
            self._reason = str(error)
            self.close()
            raise

    def _stand(self, what: str) -> None:
        self._at = what

    def close(self) -> None:
        super().close()
        self._groups.close()
        self._forms.close()

    def _require_open(self) -> None:
        if torch.is_autocast_enabled(self._device.type):
            raise BuildError(
                "a step of a pipeline of target 'megatron' was called under torch.autocast: ranks would not agree "
                "about the types of what they send",
                hint='optimizer_config={"bf16": True}',
            )
        if self._reason is not None:
            raise self._closed(self._reason)
        super()._require_open()
