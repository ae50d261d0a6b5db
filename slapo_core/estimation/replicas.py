"""What replicas exchange in a training step of target ``"torch"``: DistributedDataParallel's buckets, without it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core.private import bucket_assignment

__all__ = ["Replicas", "replicas_of"]

_LIMIT = 25 * 2**20  # bytes of a bucket: the default of option `bucket_cap_mb`
_BROADCAST = 250 * 2**20  # bytes of buffers that are sent at once


@dataclass
class _Bucket:
    """Gradients that are exchanged at once.

    Args:
        gradients: all of them, one after the other.
        views: by parameter: its own part.
        missing: parameters whose gradients have not come in this step.
    """

    gradients: torch.Tensor
    views: dict[nn.Parameter, torch.Tensor]
    missing: set[nn.Parameter] = field(default_factory=set)


class Replicas:
    """Keeps gradients in buckets, and exchanges each bucket when its last gradient has come.

    As ``torch.nn.parallel.DistributedDataParallel(gradient_as_bucket_view=True, bucket_cap_mb=25)`` does: one bucket in
    the first step; from the second on buckets of 25 MiB in the order in which gradients came in the first, into which
    gradients are moved before its forward. They hold memory from the start, and gradients are views of them; while
    nothing is exchanged, gradients have memory of their own beside. Buffers are sent from the first replica before a
    step's first forward. The class itself reads tensors in C++, which those without memory do not bear.

    Args:
        model: whose parameters get hooks.
        group: of the replicas.
        hold: told of memory that is for gradients.

    Source: ``torch/nn/parallel/distributed.py`` and ``torch/csrc/distributed/c10d/reducer.cpp``.
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup, hold: Callable[[Iterable[torch.Tensor]], None]
    ) -> None:
        self._group, self._hold = group, hold
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._buffers = list(model.buffers())
        self._of: dict[nn.Parameter, _Bucket] = {}
        self._waiting: list[_Bucket] = []  # not exchanged yet in this step, in their order
        self._came: list[nn.Parameter] = []
        self._is_rebuilt = False
        self._synchronizes = self._did_synchronize = True
        self._fill(self._parameters, sys.maxsize)
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._ready)

    @property
    def without_gradients(self) -> list[nn.Parameter]:
        """Parameters that got none in the first step; torch refuses the next one, unless it is told of them."""
        came = set(self._came)
        return [parameter for parameter in self._parameters if parameter not in came]

    def before_forward(self, *, synchronize: bool) -> None:
        """Of a micro-batch; ``synchronize`` for the last one of a step."""
        if not self._is_rebuilt and self._came:
            self._fill(self._came, _LIMIT)
            self._is_rebuilt = True
        if self._did_synchronize and self._buffers:
            self._send_buffers()
        self._synchronizes = self._did_synchronize = synchronize
        if synchronize:
            self._waiting = list({id(bucket): bucket for bucket in self._of.values()}.values())
            for bucket in self._waiting:
                bucket.missing.update(bucket.views)

    def _fill(self, parameters: Sequence[nn.Parameter], limit: int) -> None:
        self._of.clear()
        for positions in bucket_assignment(parameters, limit):
            chosen = [parameters[position] for position in positions]
            flat = torch.empty(
                sum(parameter.numel() for parameter in chosen), dtype=chosen[0].dtype, device=chosen[0].device
            )
            self._hold([flat])
            parts = flat.split([parameter.numel() for parameter in chosen])
            views = {parameter: part.view(parameter.shape) for parameter, part in zip(chosen, parts, strict=True)}
            bucket = _Bucket(flat, views)
            self._of.update(dict.fromkeys(chosen, bucket))
            for parameter in chosen:  # gradients move, bucket by bucket; old buckets go with the last of theirs
                if parameter.grad is not None:
                    views[parameter].copy_(parameter.grad)
                    parameter.grad = views[parameter]

    def _ready(self, parameter: nn.Parameter) -> None:
        if not self._synchronizes:
            return
        bucket, gradient = self._of[parameter], parameter.grad
        assert gradient is not None
        bucket.views[parameter].copy_(gradient)  # divided by the number of replicas on the way
        parameter.grad = bucket.views[parameter]
        if not self._is_rebuilt:
            self._came.append(parameter)
        bucket.missing.discard(parameter)
        while self._waiting and not self._waiting[0].missing:  # all replicas exchange buckets in one order
            dist.all_reduce(self._waiting.pop(0).gradients, group=self._group, async_op=True)

    def _send_buffers(self) -> None:
        for positions in sorted(bucket_assignment(self._buffers, _BROADCAST)):
            together = torch.cat([self._buffers[position].detach().reshape(-1) for position in positions])
            dist.broadcast(together, group=self._group, group_src=0)
            start = 0
            for buffer in (self._buffers[position] for position in positions):
                buffer.detach().copy_(together[start : start + buffer.numel()].view(buffer.shape))
                start += buffer.numel()


def replicas_of(model: nn.Module, mesh: Any, hold: Callable[[Iterable[torch.Tensor]], None]) -> Replicas | None:
    """Of the mesh's replicas (``dp``); None where there is one, or nothing is trained."""
    if mesh is None or mesh.size("dp") == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return None
    return Replicas(model, mesh.group("dp"), hold)
