"""Run stages in Megatron's 1F1B and interleaved schedules: chunks, P2P messages, and the engine.

Imports Megatron: import it in functions.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_pipelining_with_interleaving as interleaved,
    forward_backward_pipelining_without_interleaving as one_forward_one_backward,
    get_schedule_table,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from slapo_core import StepResult
from slapo_core.internals import children_of
from slapo_megatron.config import transformer_config
from slapo_megatron.engine import MegatronEngine, instances_of, reduced
from slapo_megatron.groups import start
from slapo_megatron.marks import mark
from slapo_megatron.model import Chunk, assemble, lowered, raised, working_dtype
from slapo_runtime.engine import PipelineSteps
from slapo_runtime.stages.runner import RankStages, StageCache, Work, step_seed

if TYPE_CHECKING:
    from slapo_core import Plan
    from slapo_megatron.runtime import Megatron
    from slapo_runtime.context import BuildContext
    from slapo_runtime.stages import StagedModel


class StageChunk(Chunk):
    """Run a stage; called with the number of a micro-batch, after :meth:`set_input_tensor`.

    Args:
        parameters: name -> parameter for DistributedDataParallel; a parameter of several chunks belongs to the first.
        config: Megatron's.
        place: index among the stages of this rank; None if there is one.
        is_first: whether it is the first of all stages.
        is_last: whether it is the last of all stages.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: Any, place: int | None, *, is_first: bool, is_last: bool
    ) -> None:
        super().__init__(_tree(parameters), config)
        self.vp_stage = place
        self.pre_process, self.post_process = is_first, is_last
        self._received: torch.Tensor | None = None

    work: Work

    def begin(self, work: Work) -> None:
        """Begin a step with the micro-batches of ``work``."""
        self.work = work

    def end(self) -> None:
        """Release the step's tensors."""
        del self.work
        self._received = None

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Take the previous stage's message; 1F1B passes a list."""
        self._received = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(self, number: int) -> Any:
        """Run a micro-batch.

        Returns:
            the message to the next stage, a new tensor; on the last stage the input of :meth:`Work.loss`, in float32
            if the model computes in lower precision.
        """
        received, self._received = self._received, None
        self.gather()
        outputs = self.work.forward(() if received is None else (received,), number)
        return raised(outputs, working_dtype(self.config)) if self.work.chunk.is_last else outputs[0]


def chunks_of(
    stages: Mapping[int, nn.Module], unused: Mapping[str, nn.Parameter], count: int, config: Any
) -> list[StageChunk]:
    """Return the chunks of this rank.

    Args:
        stages: number -> module of this rank's stages, in their order.
        unused: name -> parameter of this rank that no stage uses.
        count: number of all stages.
        config: Megatron's.
    """
    found: list[StageChunk] = []
    taken: set[int] = set()
    for number, stage in stages.items():
        own = {name: one for name, one in stage.named_parameters() if id(one) not in taken}
        own |= {} if found else unused
        taken |= {id(parameter) for parameter in own.values()}
        place = len(found) if len(stages) > 1 else None
        found.append(StageChunk(own, config, place, is_first=number == 0, is_last=number == count - 1))
    return found


def _tree(parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """Return modules that hold the parameters at the paths of the scheduled model."""
    root = nn.Module()
    for name, parameter in parameters.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in children_of(module):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, parameter)
    return root


def ties_of(context: BuildContext) -> list[nn.Parameter]:
    """Return this rank's parameters that other ranks along ``pp`` hold too.

    Args:
        context: from ``build``.
    """
    placement = context.placement
    assert placement is not None
    return [
        live.tensor
        for live in context.state.tensors()
        if live.is_local and isinstance(live.tensor, nn.Parameter) and len(placement.holders(live)) > 1
    ]


def _unused(context: BuildContext, stages: Any) -> dict[str, nn.Parameter]:
    """Return this rank's parameters that no stage uses, by name."""
    held = {id(parameter) for stage in stages for parameter in stage.parameters()}
    here = {live.name: live.tensor for live in context.state.tensors() if live.is_local}
    return {name: one for name, one in here.items() if isinstance(one, nn.Parameter) and id(one) not in held}


class Communicator(P2PCommunicator):  # type: ignore[misc]
    """Send messages of known sizes between stages.

    Args:
        group: Megatron's, along ``pp``.
        config: Megatron's.
    """

    def __init__(self, group: Any, config: Any) -> None:
        config = copy.copy(config)
        config.variable_seq_lengths = True  # calls _communicate_shapes for every message
        if group.size() == 2:
            config.batch_p2p_comm = False  # both neighbors are one rank: batched messages would be confused
        super().__init__(group, config)
        self._from_previous: Iterator[int] = iter(())
        self._from_next: Iterator[int] = iter(())

    def begin(self, stages: RankStages, order: Sequence[int]) -> None:
        """Begin a step.

        Args:
            stages: of this rank, with joined messages.
            order: of the stages of a rank, equal on all ranks; gradients come with the last stage first.
        """
        size, rank, last = self.pp_group.size(), self.pp_group.rank(), max(order)
        lengths = {stage: message.length for stage, message in stages.messages.items()}
        sent = (chunk * size + (rank - 1) % size for chunk in order)
        returned = ((last - chunk) * size + (rank + 1) % size - 1 for chunk in order)
        self._from_previous = iter([lengths[stage] for stage in sent if stage in lengths])
        self._from_next = iter([lengths[stage] for stage in returned if stage in lengths])
        self.config.pipeline_dtype = next(iter(stages.messages.values())).dtype

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        """Return the known shapes of the messages, without communication."""
        return [next(self._from_previous)] if recv_prev else [0], [next(self._from_next)] if recv_next else [0]


_GROUPS = ["tp", "pp", "cp", "embd", "pos_embd", "dp_cp"]  # that the schedules use


class ScheduleRunner:
    """Run Megatron's 1F1B schedule, interleaved if a rank has several stages.

    Args:
        megatron: its objects, with the chunks of this rank.
    """

    def __init__(self, megatron: Megatron) -> None:
        self._chunks, self._config = megatron.chunks, megatron.config
        self._communicator = Communicator(parallel_state.get_pipeline_model_parallel_group(), self._config)

    def run(self, stages: RankStages, works: Sequence[Work], count: int, *, backward: bool) -> list[torch.Tensor]:
        """Run all passes of a step.

        Args:
            stages: of this rank.
            works: of each stage of this rank.
            count: number of micro-batches.
            backward: whether to run backward passes and ``config.finalize_model_grads_func``.

        Returns:
            the losses of the micro-batches, on the last rank along ``pp``; nothing on others.
        """
        chunks = len(self._chunks)
        group = self._config.microbatch_group_size_per_vp_stage if chunks > 1 else count
        order = [chunk for _, chunk in get_schedule_table(count, chunks, group)]
        self._communicator.begin(stages, order)
        for chunk, work in zip(self._chunks, works, strict=True):
            chunk.module.begin(work)
        numbers = [iter(range(count)) for _ in self._chunks]
        arguments = {
            "forward_step_func": _forward_step,
            "num_microbatches": count,
            "seq_length": 1,  # the communicator knows the shapes
            "micro_batch_size": 1,
            "forward_only": not backward,
            "p2p_communicator": self._communicator,
            "pg_collection": ProcessGroupCollection.use_mpu_process_groups(_GROUPS),
        }
        try:
            if chunks > 1:
                found = interleaved(data_iterator=numbers, model=self._chunks, **arguments)
            else:
                found = one_forward_one_backward(data_iterator=numbers[0], model=self._chunks[0], **arguments)
        finally:
            for chunk in self._chunks:
                chunk.module.end()
        return [one["loss"] for one in found]


def _forward_step(numbers: Iterator[int], chunk: Any) -> tuple[Any, Any]:
    """Run one micro-batch of one stage, called by Megatron."""
    number = next(numbers)
    outputs = chunk(number)
    work = chunk.module.work
    return outputs, lambda outputs: reduced(work.loss(outputs, number))


class MegatronPipelineEngine(PipelineSteps, MegatronEngine):
    """Train stages by Megatron's 1F1B and interleaved schedules.

    Every rank gets the full batch of its replica, and has the replica's loss. A failed step closes the engine.

    Args:
        plan: of the build.
        context: from ``build``.
    """

    def __init__(self, plan: Plan, context: BuildContext) -> None:
        mesh = context.schedule.mesh
        assert mesh is not None
        self._mesh = mesh
        self._count: int = plan.config["microbatches"]
        axes = plan.config["batch_axes"] or None
        start(mesh, instances=instances_of(plan))
        config = transformer_config(plan.config, mesh)
        dtype = working_dtype(config)
        partition = context.staged_example(self._count, axes=axes).staged.partition
        self._part = context.part(partition)
        self._marks = mark(context)
        ranks, here = context.stage_ranks, mesh.rank("pp")
        own = {stage.index: stage.module for stage in partition.stages if ranks[stage.index] == here}
        config.virtual_pipeline_model_parallel_size = len(own) if len(own) > 1 else None
        chunks = chunks_of(own, _unused(context, own.values()), len(context.stage_ranks), config)
        ties = lambda: context.sum_tied_gradients("main_grad")  # noqa: E731
        with self._marks.taken_back_if_it_fails():
            super().__init__(plan, context, assemble(plan, context, chunks, config, sum_ties=ties))
        self._ties = ties_of(context)
        self._schedule = ScheduleRunner(self.megatron)
        self._stage_cache = StageCache(
            context, self._count, axes, "microbatches", self._rank_stages, lambda one: lowered(one, dtype)
        )

    def _rank_stages(self, staged: StagedModel, training: bool) -> RankStages:
        ranks, rank = self._context.stage_ranks, self._mesh.rank("pp")
        return RankStages(staged, ranks, rank, self._device, training=training, joined=True)

    @property
    def module(self) -> nn.Module:
        """The stages of this rank, with their modules at the reference paths."""
        return self._part

    # -- steps; documented in slapo_core/engine.py ---------------------------------------------------------

    def train_step(self, batch: Any) -> StepResult:
        self._refuse_autocast(self._device, "megatron", 'optimizer_config={"bf16": True}')
        self._require_trainable()
        with self._context.training(batch):
            self._external_changes.check()
            stages, works = self._works(batch, training=True)
            self._begin_step(self._part)
            with self._closing(lambda: self._at):
                with step_seed(self._device) as seed:
                    for work in works:
                        work.seed = seed
                    losses = self._schedule.run(stages, works, self._count, backward=True)
                for parameter in self._ties:
                    self._unused.seen(parameter)
                norm = self._update()
                loss = self._loss(stages, works, losses)
        return self._context.step_result(loss, None, norm)

    def eval_step(self, batch: Any) -> StepResult:
        self._refuse_autocast(self._device, "megatron", 'optimizer_config={"bf16": True}')
        self._require_open()
        with self._context.evaluating(batch):
            stages, works = self._works(batch, training=False)
            with self._closing(lambda: self._at):
                losses = self._schedule.run(stages, works, self._count, backward=False)
                return StepResult(self._loss(stages, works, losses))

    def _works(self, batch: Any, *, training: bool) -> tuple[RankStages, list[Work]]:
        micro_batches, stages = self._stage_cache.of(batch, training=training)
        return stages, [Work(stages, chunk, micro_batches, self._stand) for chunk in stages.chunks]

    def _loss(self, stages: RankStages, works: Sequence[Work], losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the mean over the micro-batches, on every rank of the replica; advance torch's RNG on all."""
        drew = any(work.drew for work in works)
        return self._exchange_loss(stages, losses, drew=drew, device=self._device)

    # -- end ----------------------------------------------------------------------------------------------------

    def _release(self) -> None:
        self._stage_cache.close()
