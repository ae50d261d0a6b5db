"""Our stages in Megatron's schedules. Imports Megatron: import it in functions."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_pipelining_with_interleaving as interleaved,
    forward_backward_pipelining_without_interleaving as one_forward_one_backward,
)
from megatron.core.process_groups_config import ProcessGroupCollection

from slapo_megatron.pipeline.communicator import Communicator
from slapo_megatron.pipeline.messages import messages_of, order_of

if TYPE_CHECKING:
    from slapo_core.spec.stage_runner import RankStages, Work
    from slapo_megatron.runtime import Megatron

__all__ = ["Schedule"]


class Schedule:
    """1F1B, or interleaved 1F1B where a rank has several stages.

    Args:
        megatron: its objects; chunks are those of this rank.
        own: the mesh's group along ``pp``, to send over; None: Megatron's.
    """

    def __init__(self, megatron: Megatron, own: Any = None) -> None:
        self._chunks, self._config = megatron.chunks, megatron.config
        self._group = parallel_state.get_pipeline_model_parallel_group()
        self._communicator = Communicator(self._group, self._config, own)

    def run(self, form: RankStages, works: Sequence[Work], count: int, *, backward: bool) -> list[torch.Tensor]:
        """All passes of a step, and what comes after them.

        Args:
            form: of the micro-batches.
            works: of each stage of this rank.
            count: of micro-batches.
            backward: whether gradients go back and are finished by ``config.finalize_model_grads_func``.

        Returns:
            the losses of the micro-batches, on the last rank along ``pp``; nothing on others.
        """
        chunks = len(self._chunks)
        group = self._config.microbatch_group_size_per_vp_stage if chunks > 1 else count
        order = order_of(chunks, count, group)
        self._communicator.begin(messages_of(form, self._group.rank(), self._group.size(), order))
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
            "pg_collection": _groups(),
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
    """What Megatron calls for each micro-batch of each stage."""
    number = next(numbers)
    outputs = chunk(number)
    return outputs, functools.partial(_loss, chunk.module.work, number)


def _loss(work: Work, number: int, outputs: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The loss for the backward pass, which Megatron divides in place, and what the step gives.

    It is the mean over one thing, the micro-batch: ranks along ``cp`` are replicas. Without that number Megatron takes
    their losses for summands, and multiplies them by how many there are.
    """
    loss = work.loss(outputs, number)
    one = torch.ones((), dtype=torch.int, device=loss.device)
    return loss.clone(), one, {"loss": loss.detach().clone()}


def _groups() -> ProcessGroupCollection:
    """What the schedules take of ``parallel_state`` where nobody gives it to them."""
    found = ProcessGroupCollection()
    found.tp = parallel_state.get_tensor_model_parallel_group()
    found.pp = parallel_state.get_pipeline_model_parallel_group()
    found.cp = parallel_state.get_context_parallel_group()
    found.embd = parallel_state.get_embedding_group(check_initialized=False)
    found.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    found.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    return found
