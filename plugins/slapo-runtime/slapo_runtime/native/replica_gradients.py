"""The mean of gradients over the replicas of a pipeline's stages, exchanged while other stages run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from slapo_core import BuildError
from slapo_runtime.flat_shards import buckets


def average_gradients(parameters: Sequence[torch.Tensor], group: Any, *, bucket_bytes: int) -> None:
    """Give every replica the mean of the gradients: a collective; arguments as of :class:`GradientAverage`."""
    average = GradientAverage(group, bucket_bytes=bucket_bytes)
    average.begin(parameters)
    average.finish()


class GradientAverage:
    """Average gradients over replicas, in one step.

    Gradients are divided before the sum, as DistributedDataParallel does it: a sum in float16 would overflow. A replica
    without a gradient of some parameter adds nothing to it; where none has one there is none after it.

    Args:
        group: of the replicas.
        bucket_bytes: that are sent at once; a larger gradient alone.
    """

    def __init__(self, group: Any, *, bucket_bytes: int) -> None:
        self._group, self._bucket_bytes = group, bucket_bytes
        self._sent: list[tuple[list[torch.Tensor], torch.Tensor, Any]] = []

    @torch.no_grad()
    def begin(self, parameters: Sequence[torch.Tensor]) -> None:
        """Send gradients, without waiting: they are not valid until :meth:`finish`.

        Args:
            parameters: the same on every replica, in the same order, in the same order of calls.

        Raises:
            BuildError: a gradient is sparse.
        """
        size = self._group.size()
        for bucket in buckets(parameters, self._bucket_bytes):
            gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in bucket]
            if any(gradient.layout != torch.strided for gradient in gradients):
                raise BuildError(
                    "sparse gradients are not averaged over replicas", hint="nn.Embedding(..., sparse=False)"
                )
            there = gradients[0].new_ones(len(bucket))
            for number, parameter in enumerate(bucket):
                if parameter.grad is None:
                    there[number] = 0
            flat = torch.cat([*[gradient.reshape(-1) for gradient in gradients], there])
            flat[: -len(bucket)].div_(size)
            work = dist.all_reduce(flat, group=self._group, async_op=True)
            for parameter, mean in zip(bucket, self._means(flat, bucket), strict=True):
                if parameter.grad is not None and parameter.grad.is_contiguous():
                    parameter.grad = mean  # which lets go of the memory of the gradient
            self._sent.append((bucket, flat, work))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all that was sent; the host waits for the device where this replica had no gradient."""
        for bucket, flat, work in self._sent:
            work.wait()
            lacking = any(parameter.grad is None for parameter in bucket)
            there = flat[-len(bucket) :].tolist() if lacking else ()
            for number, (parameter, mean) in enumerate(zip(bucket, self._means(flat, bucket), strict=True)):
                if parameter.grad is None:
                    parameter.grad = mean if there[number] else None
                elif not parameter.grad.is_contiguous():
                    parameter.grad.copy_(mean)
        self._sent.clear()

    @staticmethod
    def _means(flat: torch.Tensor, bucket: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        sizes = [parameter.numel() for parameter in bucket]
        parts = flat.split([*sizes, len(bucket)])[:-1]
        return [part.view(parameter.shape) for part, parameter in zip(parts, bucket, strict=True)]
