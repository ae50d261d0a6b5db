"""Run stages in DeepSpeed's pipeline: the engine, the module of its stages, and ties.

Imports DeepSpeed: import it in functions.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import nn

from slapo_core import StepResult
from slapo_deepspeed.engine import DeepSpeedEngine, forget_gradients, initialize
from slapo_deepspeed.marks import count_once, keep_norm, mark, marks_taken_back
from slapo_deepspeed.private import forget, losses_of, prepare
from slapo_deepspeed.runtime import start
from slapo_runtime.engine import PipelineSteps
from slapo_runtime.stages.runner import ModelChunk, RankStages, StageCache, Work, step_seed

if TYPE_CHECKING:
    from slapo_core import Plan
    from slapo_core.layout import Mesh
    from slapo_runtime.context import BuildContext
    from slapo_runtime.stages import StagedModel


class DeepSpeedPipelineEngine(PipelineSteps, DeepSpeedEngine):
    """Train stages by DeepSpeed's ``PipelineEngine``.

    Every rank gets the full batch of its replica, and has the replica's loss. All replicas evaluate together, because
    DeepSpeed synchronizes all ranks there. A failed step closes the engine.

    Args:
        plan: of the build; ``plan.config["config"]`` is DeepSpeed's completed configuration.
        context: from ``build``.
    """

    def __init__(self, plan: Plan, context: BuildContext) -> None:
        mesh = context.schedule.mesh
        assert mesh is not None
        self._mesh = mesh
        start(mesh)
        self._axes = plan.config["batch_axes"] or None
        self._count: int = plan.config["config"]["gradient_accumulation_steps"]
        for _ in context.materialize():
            pass
        self._part = context.part(context.staged_example(self._count, axes=self._axes).staged.partition)
        with marks_taken_back(context):
            self._ties = Ties(context, topology_of(mesh))
            held = {id(one) for one in self._part.parameters()}
            unused = {
                live.name: live.tensor
                for live in context.state.tensors()
                if live.is_local and isinstance(live.tensor, nn.Parameter) and id(live.tensor) not in held
            }
            self._stages = StagesModule(self._part, unused, mesh, self._tied)
            mark(context)
            count_once(context, self._ties.copies)
            engine, groups = initialize(plan, context, self._stages)
        share_types(context, engine.device)
        keep_norm(engine)
        super().__init__(plan, context, engine, groups)

        def stages_of(staged: StagedModel, training: bool) -> BufferedRankStages:
            ranks, rank = context.stage_ranks, mesh.rank("pp")
            return BufferedRankStages(staged, ranks, rank, torch.device(engine.device), training=training)

        self._stage_cache = StageCache(context, self._count, self._axes, "gradient_accumulation_steps", stages_of)

    @property
    def module(self) -> nn.Module:
        """The stages of this rank, with their modules at the reference paths."""
        return self._part

    # -- steps; documented in slapo_core.dialect.Engine ---------------------------------------------------------

    def train_step(self, batch: Any) -> StepResult:
        self._require_training()
        with self._context.training(batch):
            self._external_changes.check()
            forget_gradients(self.deepspeed)
            work = self._work(batch, training=True)
            with self._closing(lambda: self._at):
                with step_seed(self.deepspeed.device) as work.seed:
                    self.deepspeed.train_batch(self._numbers())
                loss = self._loss(work)
        return self._trained(loss)

    def eval_step(self, batch: Any) -> StepResult:
        self._require_open()
        with self._context.evaluating(batch):
            work = self._work(batch, training=False)
            with self._closing(lambda: self._at):
                self.deepspeed.eval_batch(self._numbers(), bcast_loss=False)
                return StepResult(self._loss(work))

    def _work(self, batch: Any, *, training: bool) -> Work:
        micro_batches, stages = self._stage_cache.of(batch, training=training)
        work = Work(stages, stages.chunk, micro_batches, self._stand)
        self._stages.begin(work)
        prepare(self.deepspeed, stages.received, stages.gradients)
        return work

    def _numbers(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return the micro-batch numbers that DeepSpeed takes as data."""
        numbers = [torch.tensor(number, device="cpu") for number in range(self._count)]
        return iter(list(zip(numbers, numbers, strict=True)))

    def _tied(self) -> Sequence[tuple[nn.Parameter, Any]]:
        """Return the ties to sum, after all passes of a step and before DeepSpeed's exchanges."""
        self._at = "DeepSpeed's exchange of gradients, or its optimizer's step"
        ties = self._ties.ready(self.deepspeed)
        for parameter, _ in ties:
            self._unused.seen(parameter)
        return ties

    def _loss(self, work: Work) -> torch.Tensor:
        """Return the mean over the micro-batches, on every rank of the replica; advance torch's RNG on all."""
        own = losses_of(self.deepspeed) if work.chunk.is_last else []
        return self._exchange_loss(work.stages, own, drew=work.drew, device=self.deepspeed.device)

    # -- the end ----------------------------------------------------------------------------------------------

    def _release(self) -> None:
        super()._release()
        self._stage_cache.close()
        forget(self._stages)

    def _require_open(self) -> None:
        self._refuse_autocast(torch.device(self.deepspeed.device), "deepspeed", 'config={"bf16": {"enabled": True}}')
        super()._require_open()


_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@torch.no_grad()
def share_types(context: BuildContext, device: torch.device) -> None:
    """Give placeholders the dtypes of their tensors on the owning ranks: a collective over the mesh.

    Args:
        context: of the build.
        device: of the exchanged tensors.
    """
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


class BufferedRankStages(RankStages):
    """The stages of a rank, all neighbors, with the tensors into which DeepSpeed receives messages."""

    @property
    def chunk(self) -> ModelChunk:
        """The stages of this rank."""
        (chunk,) = self.chunks
        return chunk

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        coming, going = self.chunk.coming, self.chunk.going
        self.received = coming.empty(self.device) if coming is not None else ()
        sent = going.empty(self.device) if going is not None else ()
        self.gradients = [one for one in sent if one.is_floating_point()]


# -- the stages as DeepSpeed's module


AXES = {"pp": "pipe", "dp": "data", "tp": "model"}


def topology_of(mesh: Mesh) -> ProcessTopology:
    """Return DeepSpeed's axes in the order of the mesh, so that its groups have the same ranks."""
    sizes = {AXES[mesh_dim]: size for mesh_dim, size in mesh.sizes.items() if mesh_dim in AXES}
    for axis in AXES.values():  # DeepSpeed requires all of them, and names its files by them
        sizes.setdefault(axis, 1)
    return ProcessTopology(axes=list(sizes), dims=list(sizes.values()))


class _Layer(nn.Module):
    """All stages of this rank, as one layer.

    Args:
        part: this rank's modules and tensors of the model, at the reference paths.
        unused: name -> parameter of this rank that no stage uses.
    """

    def __init__(self, part: nn.Module, unused: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.part = part
        self.unused = nn.ParameterDict({name.replace(".", "/"): one for name, one in unused.items()})

    work: Work

    def forward(self, given: Any) -> Any:
        *received, number = given if isinstance(given, tuple) else (given,)
        return self.work.forward(tuple(received), int(number))


class StagesModule(PipelineModule):
    """The stages of a schedule as DeepSpeed's module, one layer for each rank along ``pipe``.

    Every rank has the full batch of its replica, so no inputs are sent: the data iterator of a step gives only the
    numbers of the micro-batches. The surrounding engine sets the modules' modes.

    Args:
        part: this rank's modules and tensors of the model.
        unused: name -> parameter of this rank that no stage uses.
        mesh: the schedule's.
        tied: returns the parameters that several ranks along ``pipe`` hold, each with the group over which its gradient
            is summed; called once a step, on every rank, after all passes.
    """

    def __init__(
        self,
        part: nn.Module,
        unused: Mapping[str, nn.Parameter],
        mesh: Mesh,
        tied: Callable[[], Sequence[tuple[nn.Parameter, Any]]],
    ) -> None:
        own = _Layer(part, unused)
        layers = [own if rank == mesh.rank("pp") else nn.Identity() for rank in range(mesh.size("pp"))]
        with contextlib.redirect_stdout(io.StringIO()):  # it prints the contents of the plan
            super().__init__(layers, topology=topology_of(mesh), partition_method="uniform", loss_fn=self._loss)
        self.__dict__["_own"], self.__dict__["_tied"] = own, tied

    def begin(self, work: Work) -> None:
        """Begin a step."""
        self.__dict__["_work"] = self.__dict__["_own"].work = work
        self.__dict__["_count"] = 0

    def forward(self, forward_input: Any) -> Any:
        work: Work = self.__dict__["_work"]
        received = forward_input if work.chunk.coming is not None else ()
        number = self.__dict__["_count"]  # micro-batches run in order on every rank
        self.__dict__["_count"] += 1
        # DeepSpeed's activation checkpointing recomputes the layer of this number.
        outputs = super().forward((*received, torch.tensor(number, device="cpu")))
        return outputs if isinstance(outputs, tuple) else (outputs,)  # DeepSpeed unpacks a tuple of one

    def _loss(self, outputs: Any, label: torch.Tensor) -> torch.Tensor:
        work: Work = self.__dict__["_work"]
        return work.loss(outputs, self.__dict__["_count"] - 1)

    def train(self, mode: bool = True) -> StagesModule:
        """Set only this module's own flag: the surrounding engine sets the modules' modes."""
        self.training = mode
        return self

    def get_tied_weights_and_groups(self) -> Any:
        return self.__dict__["_tied"]()


# -- parameters of several stages


class Ties:
    """The tied parameters of this rank, each with a process group: a collective over the mesh.

    Args:
        context: of the build; every tensor is materialized.
        topology: DeepSpeed's.

    Attributes:
        copies: this rank's tied parameters that an earlier rank holds too.
    """

    def __init__(self, context: BuildContext, topology: Any) -> None:
        mesh, placement = context.schedule.mesh, context.placement
        assert mesh is not None
        assert placement is not None
        holders = {
            live.name: placement.holders(live)
            for live in context.state.tensors()
            if isinstance(live.tensor, nn.Parameter)
        }
        groups: dict[tuple[int, ...], Any] = {}
        for places in sorted({one for one in holders.values() if len(one) > 1}):
            for data, model in itertools.product(range(mesh.size("dp")), range(mesh.size("tp"))):
                ranks = [topology.get_rank(pipe=place, data=data, model=model) for place in places]
                group = dist.new_group(ranks)
                if mesh.global_rank in ranks:
                    groups[places] = group
        self._ties: list[tuple[nn.Parameter, Any]] = []
        self.copies: list[nn.Parameter] = []
        for live in context.state.tensors():
            places = holders.get(live.name, ())
            if live.is_local and len(places) > 1:
                assert isinstance(live.tensor, nn.Parameter)
                self._ties.append((live.tensor, groups[places]))
                if mesh.rank("pp") != places[0]:
                    self.copies.append(live.tensor)

    def ready(self, engine: Any) -> list[tuple[nn.Parameter, Any]]:
        """Return the ties with their groups, each with a gradient: zeros where there was none.

        Args:
            engine: DeepSpeed's, which then sums the gradients; accumulated gradients of another dtype, which its
                optimizer keeps under a name of its own, are summed here.
        """
        found = []
        for parameter, group in self._ties:
            if not parameter.requires_grad:
                continue
            if engine.using_bf16_optimizer:
                _mark_gradient_present(engine.optimizer, parameter)
            elif getattr(engine.optimizer, "use_grad_accum_attribute", False):
                _sum_accumulated(engine.optimizer, parameter, group)
                continue
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            found.append((parameter, group))
        return found


def _mark_gradient_present(optimizer: Any, parameter: nn.Parameter) -> None:
    """Let DeepSpeed clip a tied gradient after the sum, also one that was zeros on this rank."""
    for number, group in enumerate(optimizer.bf16_groups):
        for place, one in enumerate(group):
            if one is parameter:
                optimizer.fp32_groups_has_gradients[number][place] = True
                one._hp_grad = optimizer.fp32_groups_gradients[number][place]  # type: ignore[attr-defined]


def _sum_accumulated(optimizer: Any, parameter: Any, group: Any) -> None:
    if parameter.grad_accum is None:
        parameter.grad_accum = torch.zeros_like(parameter, dtype=optimizer.gradient_accumulation_dtype)
    dist.all_reduce(parameter.grad_accum, group=group)
