"""Adapt stages to the schedules of ``torch.distributed.pipelining``, and run a step.

A test compares this module with the installed torch: its schedules, and their calls of a stage with these arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed import pipelining

from slapo_torch.private import top_saved_tensors_hooks


class StageBase:
    """The interface of a stage for torch's schedules, with empty defaults.

    It is not a subclass of torch's own stage, whose constructor and internals change with every release: schedules take
    any object with these members. A missing member is an AttributeError in the first step.

    Args:
        module: of the stage.
        index: of the stage.
        count: of all stages.
        device: of the stage.
        group: of the ranks along ``pp``.
    """

    def __init__(self, module: nn.Module, index: int, count: int, device: torch.device, group: Any) -> None:
        self.submod, self.stage_index, self.num_stages = module, index, count
        self.is_first, self.is_last = index == 0, index == count - 1
        self.device, self.group = device, group
        self.group_rank, self.group_size = group.rank(), group.size()
        self.stage_index_to_group_rank: dict[int, int] = {}  # the schedule's
        self.has_backward = False
        self.output_chunks: list[Any] = []

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Do nothing: losses are divided before the backward, and replicas average gradients themselves."""

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Do nothing, as for :meth:`perform_reduce_grad`."""

    def release_fwd_send_outputs(self, fwd_chunk_id: int) -> None:
        """Do nothing: sent values are kept for the backward pass."""


CALLED = (
    "backward_one_chunk",
    "backward_weight_one_chunk",
    "clear_runtime_states",
    "forward_one_chunk",
    "get_bwd_recv_ops",
    "get_bwd_send_ops",
    "get_fwd_recv_ops",
    "get_fwd_send_ops",
    "get_local_bwd_output",
    "perform_reduce_grad",
    "release_fwd_send_outputs",  # since torch 2.15
    "scale_grads",
    "set_local_bwd_input",
    "set_local_fwd_input",
)
"""Methods of a stage that schedules call."""


def make_schedule(name: str, stages: Any, count: int, **options: Any) -> Any:
    """Make a schedule without shape inference before its first step.

    Args:
        name: of a class in ``torch.distributed.pipelining``, e.g. ``"Schedule1F1B"``.
        stages: of this rank: one for a schedule of single stages, else a list.
        count: of micro-batches.
        options: further arguments of the class.
    """
    schedule = getattr(pipelining, name)(stages, count, **options)
    setattr(schedule, "_initialize_stages" if isinstance(stages, list) else "_initialize_stage", _infer_nothing)
    return schedule


def _infer_nothing(*args: Any, **kwargs: Any) -> None:
    """Skip the shape inference."""


def step(schedule: Any, count: int, *, backward: bool) -> None:
    """Run one step of a schedule whose stages take micro-batches by number.

    The target consists of these numbers, one for each micro-batch.

    Args:
        schedule: an instance.
        count: of micro-batches.
        backward: False runs the forwards only.
    """
    numbers = torch.arange(count)
    (schedule.step if backward else schedule.eval)(target=numbers, losses=[], return_outputs=False)


def recomputes() -> Any:
    """Return the active saved-tensor hooks, which differ inside a checkpointed function."""
    return top_saved_tensors_hooks(True)
