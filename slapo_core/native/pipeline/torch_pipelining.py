"""Everything that is taken of ``torch.distributed.pipelining`` beyond its public names; nothing else imports those.

A test holds what is said here against the installed torch: the classes are there, the schedules call these methods of
a stage with these arguments, and a step takes the target that numbers the micro-batches.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.stage import _PipelineStageBase

__all__ = ["CALLED", "Operation", "StageBase", "recomputes", "schedule_class", "step"]


_Base: Any = _PipelineStageBase


class StageBase(_Base):  # type: ignore[misc]
    """What the schedules take for a stage, with what they read of it; its methods are the subclass's.

    Torch's own constructor is not called: it looks the group up in a list, where ours is not.

    Args:
        module: that the stage runs.
        index: of the stage.
        count: of all stages.
        device: where it computes.
        group: of the ranks along ``pp``.
    """

    def __init__(self, module: nn.Module, index: int, count: int, device: torch.device, group: Any) -> None:
        self.submod, self.stage_index, self.num_stages = module, index, count
        self.device, self.group = device, group
        self.group_rank, self.group_size = group.rank(), group.size()
        self.stage_index_to_group_rank: dict[int, int] = {}  # the schedule's
        self.has_backward = False
        self.args_recv_info: dict[int, tuple[()]] = {0: ()}
        self.act_send_info: dict[int, list[int]] = {}
        self.output_chunks: list[Any] = []

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: shapes are known."""

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def _create_grad_recv_info(self, act_send_info: Any) -> tuple[()]:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return []

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing: losses are divided before they go back, and replicas exchange gradients after the schedule."""

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Nothing, likewise."""


class Operation(dist.P2POp):
    """One message; over a group that torch does not list."""

    def __init__(self, op: Any, tensor: torch.Tensor, *, group: Any, group_peer: int, tag: int) -> None:
        self.op, self.tensor, self.group = op, tensor, group
        self.peer = self.group_peer = group_peer
        self.tag = tag


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
    "scale_grads",
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
