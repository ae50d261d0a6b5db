"""Wrap the stages of one rank as Megatron's model chunks. Imports Megatron: import it in functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_megatron.model.assembly import assemble
from slapo_megatron.model.chunk import Chunk, raised, working_dtype
from slapo_megatron.private import children_of

if TYPE_CHECKING:
    from slapo_core import Plan
    from slapo_megatron.runtime import Megatron
    from slapo_runtime.context import BuildContext
    from slapo_runtime.partition import Partition
    from slapo_runtime.stage_runner import Work


class StageChunk(Chunk):
    """A stage: it is called with the number of a micro-batch, and has what came for it from :meth:`set_input_tensor`.

    Args:
        parameters: by name, which DistributedDataParallel looks after; of those that several chunks of a rank use, the
            first one has them.
        config: Megatron's.
        place: among the stages of this rank; None where there is one.
        is_first: of all stages.
        is_last: of all stages.
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
        """A step: the micro-batches are those of ``work``."""
        self.work = work

    def end(self) -> None:
        """Release the step's tensors."""
        del self.work
        self._received = None

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Take the previous stage's message; 1F1B passes a list."""
        self._received = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(self, number: int) -> Any:
        """The passes of a micro-batch.

        Returns:
            the message to the next stage, a tensor of its own; on the last stage the input of :meth:`Work.loss`, in
            float32 where the model computes in lower precision.
        """
        received, self._received = self._received, None
        with self.around():
            outputs = self.work.forward(() if received is None else (received,), number)
        return raised(outputs, working_dtype(self.config)) if self.work.chunk.is_last else outputs[0]


def chunks_of(
    stages: Mapping[int, nn.Module], unused: Mapping[str, nn.Parameter], count: int, config: Any
) -> list[StageChunk]:
    """The chunks of this rank.

    Args:
        stages: of this rank, by number, in their order.
        unused: parameters that live on this rank and that no stage uses, by name.
        count: of all stages.
        config: Megatron's.
    """
    found: list[StageChunk] = []
    taken: set[int] = set()
    for number, stage in stages.items():
        own = _named(stage, taken)
        if not found:
            own |= unused
        taken |= {id(parameter) for parameter in own.values()}
        place = len(found) if len(stages) > 1 else None
        found.append(StageChunk(own, config, place, is_first=number == 0, is_last=number == count - 1))
    return found


def _named(stage: nn.Module, taken: Collection[int]) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in stage.named_parameters() if id(parameter) not in taken}


def _tree(parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """Modules that only hold the parameters, at the paths of the scheduled model."""
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


def assembled(
    plan: Plan, context: BuildContext, config: Any, partition: Partition, passes_are_over: Callable[[], None]
) -> Megatron:
    """One chunk for each stage of this rank.

    Args:
        plan: of the build.
        context: from ``build``; parameters are marked.
        config: Megatron's.
        partition: of the model, for any input signature.
        passes_are_over: called on every rank when all passes of a step are, before ranks wait in Megatron's groups.
    """
    mesh = context.schedule.mesh
    assert mesh is not None
    ranks = context.stage_ranks
    own = {stage.index: stage.module for stage in partition.stages if ranks[stage.index] == mesh.rank("pp")}
    config.virtual_pipeline_model_parallel_size = len(own) if len(own) > 1 else None
    chunks = chunks_of(own, _unused(context, own.values()), len(ranks), config)
    megatron = assemble(plan, context, chunks, config, sum_ties=lambda: context.sum_tied_gradients("main_grad"))
    finalize = config.finalize_model_grads_func

    def after_all(*args: Any, **kwargs: Any) -> None:
        passes_are_over()
        finalize(*args, **kwargs)

    config.finalize_model_grads_func = after_all
    return megatron


def ties_of(context: BuildContext) -> list[nn.Parameter]:
    """Parameters of this rank that others along ``pp`` hold too.

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
    """Parameters that live on this rank and that no stage uses, by name."""
    held = {id(parameter) for stage in stages for parameter in stage.parameters()}
    here = {live.name: live.tensor for live in context.state.tensors() if live.is_local}
    return {name: one for name, one in here.items() if isinstance(one, nn.Parameter) and id(one) not in held}
