"""Everything that is taken of ``torch.distributed.pipelining`` beyond its public names; nothing else imports those.

A test holds what is said here against the installed torch: the classes are there, the schedules call these methods of
a stage with these arguments, and a step takes the target that numbers the micro-batches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import pipelining
from torch.distributed.pipelining.stage import _PipelineStageBase

__all__ = ["CALLED", "StageBase", "recomputes", "schedule_class", "step"]

StageBase: Any = _PipelineStageBase
"""What the schedules take for a stage; its constructor needs no metadata."""

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
    "set_local_bwd_input",
    "set_local_fwd_input",
    "_get_init_p2p_neighbors_ops",
    "_prepare_backward_infra",
    "_prepare_forward_infra",
)
"""Methods of a stage that schedules call; ours are all our own."""


def schedule_class(name: str) -> Any:
    """A schedule by the name of its class, e.g. ``"Schedule1F1B"``."""
    return getattr(pipelining, name)


def step(schedule: Any, count: int, *, backward: bool) -> None:
    """Run one step of a schedule whose stages know their micro-batches by number.

    The target is cut into as many pieces as there are micro-batches: their numbers.

    Args:
        schedule: an instance.
        count: of micro-batches.
        backward: False runs the forwards only.
    """
    numbers = torch.arange(count)
    (schedule.step if backward else schedule.eval)(target=numbers, losses=[], return_outputs=False)


def recomputes() -> Any:
    """What packs tensors that are saved for backward just now: another one inside of a checkpointed function."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)
