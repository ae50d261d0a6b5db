"""The engine of target ``"megatron"`` for a model that is cut into stages."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import BuildError, StepResult
from slapo_megatron.engine import MegatronEngine, Updates
from slapo_megatron.groups.process_groups import start
from slapo_megatron.marks import mark
from slapo_runtime.stage_runner import RankStages, StageCache, Work, advance, step_seed

if TYPE_CHECKING:
    from slapo_core import Plan
    from slapo_runtime.context import BuildContext
    from slapo_runtime.stages import StagedModel


class PipelineEngine(MegatronEngine):
    """The implementation of :class:`slapo_core.dialect.Engine` by Megatron's 1F1B and interleaved schedules.

    Every rank is given the whole batch of its replica, and has the replica's loss. After a step that failed the engine
    is closed.

    Args:
        plan: of the build.
        context: from ``build``.
    """

    def __init__(self, plan: Plan, context: BuildContext) -> None:
        mesh = context.schedule.mesh
        assert mesh is not None
        self._mesh = mesh
        self._at = "nothing"  # of a step, for the message of an error
        self._count: int = plan.config["microbatches"]
        axes = plan.config["batch_axes"] or None
        per_rank = len(context.stage_ranks) // mesh.size("pp")
        self._lease = start(mesh, virtual=per_rank if per_rank > 1 else None)

        from slapo_megatron.model.assembly import transformer_config
        from slapo_megatron.model.chunk import lowered, working_dtype
        from slapo_megatron.pipeline.chunks import assembled, ties_of
        from slapo_megatron.pipeline.schedule import Schedule

        config = transformer_config(plan.config, mesh)
        dtype = working_dtype(config)
        partition = context.staged_example(self._count, axes=axes).staged.partition
        self._part = context.part(partition)
        over = weakref.WeakMethod(self._passes_are_over)  # what hooks of Megatron's wrappers hold is never collected
        self._marks = mark(context)
        with self._marks.taken_back_if_it_fails():
            megatron = assembled(plan, context, config, partition, lambda: _call(over))
        super().__init__(plan, context, megatron)
        self._updates = Updates(plan, context, megatron)
        self._ties = ties_of(context)
        self._loss_dtype = None if dtype is None else torch.float32
        self._schedule = Schedule(megatron, mesh.group("pp") if self._device.type == "cpu" else None)
        self._forms = StageCache(
            context, self._count, axes, "microbatches", self._form, lambda one: lowered(one, dtype)
        )

    def _form(self, staged: StagedModel, training: bool) -> RankStages:
        ranks, rank = self._context.stage_ranks, self._mesh.rank("pp")
        return RankStages(staged, ranks, rank, self._device, training=training, joined=True)

    @property
    def module(self) -> nn.Module:
        """This rank's part of the scheduled model."""
        return self._part

    # -- steps; documented in slapo_core/engine.py ---------------------------------------------------------

    def train_step(self, batch: Any) -> StepResult:
        self._refuse_autocast()
        self._require_trainable()
        with self._context.training(batch):
            self._between.check()
            form, works = self._works(batch, training=True)
            self._updates.begin(self._part)
            with self._closing(lambda: self._at):
                with step_seed(self._device) as seed:
                    for work in works:
                        work.seed = seed
                    losses = self._schedule.run(form, works, self._count, backward=True)
                self._updates.seen(self._ties)
                norm = self._updates.step(self._device)
                self._after_step()
                loss = self._loss(form, works, losses)
        return StepResult(loss, None, norm)

    def eval_step(self, batch: Any) -> StepResult:
        self._refuse_autocast()
        self._require_open()
        with self._context.evaluating(batch):
            form, works = self._works(batch, training=False)
            with self._closing(lambda: self._at):
                losses = self._schedule.run(form, works, self._count, backward=False)
                return StepResult(self._loss(form, works, losses))

    def _works(self, batch: Any, *, training: bool) -> tuple[RankStages, list[Work]]:
        cut, form = self._forms.of(batch, training=training)
        return form, [Work(form, chunk, cut, self._stand) for chunk in form.chunks]

    def _loss(self, form: RankStages, works: Sequence[Work], losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """The mean over the micro-batches, on every rank of the replica; all of them move on in torch's stream."""
        self._at = "exchanging the loss"
        message = torch.zeros(2, dtype=torch.float64, device=self._device)
        message[1] = any(work.drew for work in works)
        if losses:
            message[0] = torch.stack(list(losses)).mean()
        dist.all_reduce(message, group=self._mesh.group("pp"))
        loss, drew = message.unbind()
        if drew:
            advance()
        return loss.to(self._loss_dtype or form.loss_dtype)

    def _passes_are_over(self) -> None:
        self._at = "Megatron's exchange of gradients, or its optimizer's step"

    # -- the end ------------------------------------------------------------------------------------------------

    def _stand(self, what: str) -> None:
        self._at = what

    def _release(self) -> None:
        from slapo_megatron.model.assembly import release

        self._updates.end()
        release(self.megatron, self._marks, gather=self._reason is None)
        self._forms.close()

    def _require_open(self) -> None:
        if self._reason is not None:
            raise self._closed(self._reason)
        super()._require_open()

    def _refuse_autocast(self) -> None:
        if torch.is_autocast_enabled(self._device.type):
            raise BuildError(
                "a step of a pipeline of target 'megatron' was called under torch.autocast: the dtypes of "
                "P2P messages would differ between ranks",
                hint='optimizer_config={"bf16": True}',
            )


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    found = method()
    if found is not None:
        found()
