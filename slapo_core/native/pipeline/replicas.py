"""Gradients of replicas: their mean, in one go after the schedule.

DistributedDataParallel exchanges them as they come, by hooks that the second part of a zero-bubble backward never
fires; so they are exchanged when all of them are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from slapo_core import BuildError

__all__ = ["average_gradients"]


@torch.no_grad()
def average_gradients(parameters: Sequence[torch.Tensor], group: Any, *, bucket_bytes: int) -> None:
    """Give every replica the mean of the gradients: a collective.

    A replica without a gradient of some parameter adds nothing to it; where none has one there is none after it.

    Args:
        parameters: the same on every replica, in the same order.
        group: of the replicas.
        bucket_bytes: that are sent at once; a larger gradient by itself.

    Raises:
        BuildError: a gradient is sparse.
    """
    size = group.size()
    for bucket in _buckets(parameters, bucket_bytes):
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in bucket]
        there = torch.tensor([one.grad is not None for one in bucket]).to(gradients[0])
        if any(gradient.layout != torch.strided for gradient in gradients):
            raise BuildError("sparse gradients are not averaged over replicas", hint="nn.Embedding(..., sparse=False)")
        flat = torch.cat([*[gradient.reshape(-1) for gradient in gradients], there])
        dist.all_reduce(flat, group=group)
        *means, there = flat.split([*[one.numel() for one in bucket], len(bucket)])
        for number, (parameter, gradient, mean) in enumerate(zip(bucket, gradients, means, strict=True)):
            if parameter.grad is None:
                if not there[number]:
                    continue
                parameter.grad = gradient
            gradient.copy_(mean.view(gradient.shape)).div_(size)


def _buckets(parameters: Sequence[torch.Tensor], bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
    by_kind: dict[tuple[str, str], list[torch.Tensor]] = {}
    for parameter in parameters:
        by_kind.setdefault((str(parameter.dtype), parameter.device.type), []).append(parameter)
    for _, alike in sorted(by_kind.items()):
        bucket: list[torch.Tensor] = []
        for parameter in alike:
            if bucket and sum(one.nbytes for one in (*bucket, parameter)) > bucket_bytes:
                yield bucket
                bucket = []
            bucket.append(parameter)
        if bucket:
            yield bucket
