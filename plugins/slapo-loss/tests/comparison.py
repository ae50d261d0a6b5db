"""Gradients beside those of torch, and ranks as threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def gradients(value: Any, tensors: list[Tensor]) -> list[Tensor]:
    outputs, of_this = value if isinstance(value, tuple) else (value,), torch.Generator().manual_seed(1)
    given = [torch.rand(one.shape, dtype=one.dtype, generator=of_this) for one in outputs]
    found = torch.autograd.grad(outputs, tensors, given)
    return [*outputs, *found]


def agrees(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        tolerance = 1e-12 if other.dtype == torch.float64 and expected[0].dtype == torch.float64 else 3e-6
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def in_step(run: Callable[[int, Callable[[Tensor], Tensor]], Any], ranks: int) -> list[Any]:
    """Run functions in threads that meet in each gather."""
    barrier, shown = threading.Barrier(ranks), [torch.empty(0)] * ranks
    results: list[Any] = [None] * ranks

    def gather_of(rank: int) -> Callable[[Tensor], Tensor]:
        def gather(tensor: Tensor) -> Tensor:
            shown[rank] = tensor
            barrier.wait(60)
            found = torch.stack(shown)
            barrier.wait(60)
            return found

        return gather

    def start(rank: int) -> None:
        try:
            results[rank] = run(rank, gather_of(rank))
        except BaseException:
            barrier.abort()
            raise

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
