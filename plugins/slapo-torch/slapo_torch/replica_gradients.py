"""Average gradients over the replicas of a pipeline's stages, while other stages run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from slapo_core import BuildError
from slapo_runtime.flat_shards import buckets

if TYPE_CHECKING:
    from slapo_torch.running_stage import PipelineRunner


def averaging(
    runner: PipelineRunner, parameters: Sequence[torch.Tensor], group: Any, *, bucket_bytes: int
) -> tuple[Callable[[int], None], Callable[[], None]]:
    """Average the gradients of one step as its stages end.

    Replicas run the same schedule, and so send in the same order. Parameters of several stages of this rank are sent
    last; parameters outside of the stages, which only the user's loss may use, are skipped without a gradient.

    Args:
        runner: of the stages.
        parameters: the trained parameters of this rank.
        group: of the replicas; None does not average.
        bucket_bytes: as for :class:`GradientAverage`.

    Returns:
        a function that sends the gradients of a stage, for :meth:`PipelineRunner.run`, and one that ends the exchange.
    """
    if group is None:
        return lambda stage: None, lambda: None
    average = GradientAverage(group, bucket_bytes=bucket_bytes)
    by_stage, others = runner.divide(parameters)

    def finish() -> None:
        average.begin([one for one, is_used in others if is_used or one.grad is not None])
        average.finish()

    return lambda stage: average.begin(by_stage[stage]), finish


class GradientAverage:
    """Average gradients over replicas, in one step.

    Gradients are divided before the sum, as by DistributedDataParallel: a sum in float16 could overflow. A replica
    without a gradient adds nothing; if no replica has one, there is none afterwards.

    Args:
        group: of the replicas.
        bucket_bytes: the size of a message; a larger gradient is sent alone.
    """

    def __init__(self, group: Any, *, bucket_bytes: int) -> None:
        self._group, self._bucket_bytes = group, bucket_bytes
        self._sent: list[tuple[list[torch.Tensor], torch.Tensor, Any]] = []

    @torch.no_grad()
    def begin(self, parameters: Sequence[torch.Tensor]) -> None:
        """Send gradients, without waiting: they are invalid until :meth:`finish`.

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
                    parameter.grad = mean  # releases the memory of the gradient
            self._sent.append((bucket, flat, work))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all messages, on the host only if a gradient is missing."""
        for bucket, flat, work in self._sent:
            work.wait()
            there = flat[-len(bucket) :]
            for number, (parameter, mean) in enumerate(zip(bucket, self._means(flat, bucket), strict=True)):
                if parameter.grad is None:
                    parameter.grad = mean if there[number] else None  # the one read of the device
                elif not parameter.grad.is_contiguous():
                    parameter.grad.copy_(mean)
        self._sent.clear()

    @staticmethod
    def _means(flat: torch.Tensor, bucket: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        sizes = [parameter.numel() for parameter in bucket]
        parts = flat.split([*sizes, len(bucket)])[:-1]
        return [part.view(parameter.shape) for part, parameter in zip(parts, bucket, strict=True)]
