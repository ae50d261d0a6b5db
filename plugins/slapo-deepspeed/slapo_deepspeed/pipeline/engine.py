"""The engine of target ``"deepspeed"`` for a model that is cut into stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import BuildError, StepResult
from slapo_deepspeed.engine import DeepSpeedEngine
from slapo_deepspeed.grad_norm_marks import count_once, keep_norm, mark, marks_taken_back, norm_of_last_step
from slapo_deepspeed.initialization import has_optimizer, initialize
from slapo_deepspeed.pipeline.frozen_ranks import bare_ranks, placeholder
from slapo_deepspeed.pipeline.ties import Ties
from slapo_deepspeed.private import forget, losses_of, prepare
from slapo_deepspeed.process_groups import start
from slapo_deepspeed.zero.gradients import forget_gradients, unused_parameters
from slapo_runtime.stage_runner import ModelChunk, RankStages, StageCache, Work, advance, step_seed

if TYPE_CHECKING:
    import torch

    from slapo_core import Plan
    from slapo_runtime.context import BuildContext
    from slapo_runtime.stages import StagedModel


class PipelineEngine(DeepSpeedEngine):
    """The implementation of :class:`slapo_core.dialect.Engine` by DeepSpeed's PipelineEngine.

    Every rank is given the whole batch of its replica, and has the replica's loss. All replicas evaluate together,
    because DeepSpeed has all ranks wait for each other there. After a step that failed the engine is closed.

    Args:
        plan: of the build; ``plan.config["config"]`` is DeepSpeed's completed configuration.
        context: from ``build``.
    """

    def __init__(self, plan: Plan, context: BuildContext) -> None:
        mesh = context.schedule.mesh
        assert mesh is not None
        self._mesh = mesh
        if plan.config["config"].get("torch_autocast", {}).get("enabled"):
            raise _no_autocast("'torch_autocast' of config is enabled, and the mesh has a pipeline")
        start(mesh)
        self._axes = plan.config["batch_axes"] or None
        self._count: int = plan.config["config"]["gradient_accumulation_steps"]
        self._trains = has_optimizer(plan, context)
        self._at = "nothing"  # of a step, for the message of an error
        self._has_stepped = False
        for _ in context.materialize():
            pass
        self._part = context.part(context.staged_example(self._count, axes=self._axes).staged.partition)
        bare = bare_ranks(context) if self._trains else frozenset()
        self._placeholder = placeholder(context) if mesh.rank("pp") in bare else None
        with marks_taken_back(context):
            self._make(context)
            mark(context)
            count_once(context, self._ties.copies)
            also = () if self._placeholder is None else (self._placeholder,)
            engine, groups = initialize(plan, context, self._stages, also=also)
        share_types(context, engine.device)
        keep_norm(engine)
        super().__init__(plan, context, engine, groups)
        self._unused = unused_parameters(context, engine)
        make = forms_with_buffers(context, engine.device, bare)
        self._forms = StageCache(context, self._count, self._axes, "gradient_accumulation_steps", make)

    def _make(self, context: BuildContext) -> None:
        """DeepSpeed's module, and the process groups of ties."""
        from slapo_deepspeed.pipeline.module import StagesModule, topology_of

        mesh = context.schedule.mesh
        assert mesh is not None
        held = {id(one) for one in self._part.parameters()}
        here = [live for live in context.state.tensors() if live.is_local]
        unused = {one.name: one.tensor for one in here if isinstance(one.tensor, nn.Parameter)}
        unused = {name: one for name, one in unused.items() if id(one) not in held}
        self._ties = Ties(context, topology_of(mesh))
        self._stages = StagesModule(self._part, unused, self._placeholder, mesh, self._tied)

    @property
    def module(self) -> nn.Module:
        """This rank's part of the scheduled model."""
        return self._part

    # -- steps; documented in slapo_core.dialect.Engine ---------------------------------------------------------

    def train_step(self, batch: Any) -> StepResult:
        self._require_open()
        if not self._trains:
            raise self._without_optimizer()
        self._refuse_without_gradients()
        with self._context.training(batch):
            self._between.check()
            forget_gradients(self.deepspeed)
            work = self._work(batch, training=True)
            with self._closing(lambda: self._at):
                with step_seed(self.deepspeed.device) as work.seed:
                    self.deepspeed.train_batch(self._numbers())
                loss = self._loss(work)
        self._between.note()
        self._unused.step_is_over()
        if not self._has_stepped:
            self._end_first_step()
        norm = norm_of_last_step(self.deepspeed) if self.deepspeed.gradient_clipping() else None
        return StepResult(loss, None, norm)

    def eval_step(self, batch: Any) -> StepResult:
        self._require_open()
        with self._context.evaluating(batch):
            work = self._work(batch, training=False)
            with self._closing(lambda: self._at):
                self.deepspeed.eval_batch(self._numbers(), bcast_loss=False)
                return StepResult(self._loss(work))

    def _end_first_step(self) -> None:
        self._has_stepped = True
        if self._context.optimizer is None:  # nothing else tells that it is over
            self._context.clip_gradients()  # there are none any more

    def _work(self, batch: Any, *, training: bool) -> Work:
        cut, form = self._forms.of(batch, training=training)
        work = Work(form, form.chunk, cut, self._stand, placeholder=self._placeholder)
        self._stages.begin(work)
        prepare(self.deepspeed, form.received, form.gradients)
        return work

    def _numbers(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the micro-batch numbers that DeepSpeed takes as data."""
        return iter([(torch.tensor(number), torch.tensor(number)) for number in range(self._count)])

    def _tied(self) -> Sequence[tuple[nn.Parameter, Any]]:
        """All passes of a step are over here; DeepSpeed's exchanges follow."""
        self._at = "DeepSpeed's exchange of gradients, or its optimizer's step"
        ties = self._ties.ready(self.deepspeed)
        for parameter, _ in ties:
            self._unused.seen(parameter)
        return ties

    def _loss(self, work: Work) -> torch.Tensor:
        """The mean over the micro-batches, on every rank of the replica; all of them move on in torch's stream."""
        self._at = "exchanging the loss"
        message = torch.zeros(2, dtype=torch.float64, device=self.deepspeed.device)
        message[1] = work.drew
        if work.chunk.is_last:
            message[0] = torch.stack(losses_of(self.deepspeed)).mean()
        dist.all_reduce(message, group=self._mesh.group("pp"))
        loss, drew = message.unbind()
        if drew:
            advance()
        return loss.to(work.form.loss_dtype)

    # -- the end ----------------------------------------------------------------------------------------------

    def _stand(self, what: str) -> None:
        self._at = what

    def _release(self) -> None:
        """The engine's own state, apart from DeepSpeed's."""
        self._forms.close()
        self._unused.stop()
        forget(self._stages)

    def _require_open(self) -> None:
        if torch.is_autocast_enabled(torch.device(self.deepspeed.device).type):
            raise _no_autocast("a step of a pipeline of target 'deepspeed' was called under torch.autocast")
        if self._reason is not None:
            raise self._closed(self._reason)
        super()._require_open()


def _no_autocast(what: str) -> BuildError:
    """A rank finds the other stages on placeholders (meta tensors), which autocast ignores."""
    return BuildError(
        f"{what}: the dtypes of P2P messages would differ between ranks", hint='config={"bf16": {"enabled": True}}'
    )


_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@torch.no_grad()
def share_types(context: BuildContext, device: torch.device) -> None:
    """Give placeholders the dtypes of their tensors on the owning ranks: a collective over the mesh.

    Args:
        context: of the build.
        device: that ranks send from.
    """
    import torch.distributed as dist

    mesh = context.schedule.mesh
    assert mesh is not None
    tensors = context.state.tensors()
    own = [
        _TYPES.index(live.tensor.dtype) + 1 if live.is_local and live.tensor.dtype in _TYPES else 0 for live in tensors
    ]
    types = torch.tensor(own, dtype=torch.uint8, device=device)
    dist.all_reduce(types, op=dist.ReduceOp.MAX, group=mesh.group("pp"))
    for live, number in zip(tensors, types.tolist(), strict=True):
        if not live.is_local and number and live.tensor.dtype != _TYPES[number - 1]:
            live.tensor.data = live.tensor.data.to(_TYPES[number - 1])


class BufferedForm(RankStages):
    """A form with the tensors that DeepSpeed receives its messages in; the stages of a rank are neighbors."""

    @property
    def chunk(self) -> ModelChunk:
        """The stages of this rank."""
        (chunk,) = self.chunks
        return chunk

    def allocate(self) -> None:
        """Once, for all steps of this form."""
        coming, going = self.chunk.coming, self.chunk.going
        self.received = coming.empty(self.device) if coming is not None else ()
        sent = going.empty(self.device) if going is not None else ()
        self.gradients = [one for one in sent if one.is_floating_point()]


def forms_with_buffers(
    context: BuildContext, device: torch.device, bare: Collection[int]
) -> Callable[[StagedModel, bool], BufferedForm]:
    """Return a function that makes a `BufferedForm` of stages.

    Args:
        context: from ``build``.
        device: where stages compute.
        bare: the ranks along ``pp`` that train nothing.
    """
    mesh = context.schedule.mesh
    assert mesh is not None
    rank = mesh.rank("pp")

    def make(staged: StagedModel, training: bool) -> BufferedForm:
        form = BufferedForm(staged, context.stage_ranks, rank, device, training=training, bare=bare)
        form.allocate()
        return form

    return make
