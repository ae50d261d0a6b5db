"""Kernels that no operator of torch wraps: launched on addresses, as by Triton or by an extension in C++."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import nn

ADDRESSES: list[int] = []
"""Those that kernels were launched on, since a test emptied it."""


def by_python(x: torch.Tensor) -> torch.Tensor:
    """Copy ``x``; the launcher calls ``data_ptr`` of tensors, as Triton's does."""
    out = torch.empty_like(x)
    _launch(out.data_ptr(), x.data_ptr(), x)
    return out


def by_extension(x: torch.Tensor) -> torch.Tensor:
    """Copy ``x``; the addresses are read where Python does not see it."""
    out = torch.empty_like(x)
    with torch._C.DisableTorchFunction():
        target, source = out.data_ptr(), x.data_ptr()
    _launch(target, source, x)
    return out


def _launch(target: int, source: int, x: torch.Tensor) -> None:
    ADDRESSES.extend([target, source])
    if target and source:
        ctypes.memmove(target, source, x.untyped_storage().nbytes())


class Copied(torch.autograd.Function):
    """A kernel with a backward, as libraries of kernels write them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return by_extension(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 3 * gradient


@torch.library.custom_op("slapo_graph_tests::copied", mutates_args=())
def _copied(x: torch.Tensor) -> torch.Tensor:
    return by_extension(x)


_copied.register_fake(torch.empty_like)


def by_operator(x: torch.Tensor) -> torch.Tensor:
    """Copy ``x``, by an operator with a fake implementation."""
    return _copied(x)


class Kernel(nn.Module):
    """Calls a kernel: in training only, or at every call.

    Args:
        copy: the function.
        only_in_training: whether evaluation goes without.
    """

    def __init__(self, copy: Any, *, only_in_training: bool = False) -> None:
        super().__init__()
        self.copy, self.only_in_training = copy, only_in_training

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.copy(x) if self.training or not self.only_in_training else x


class Block(nn.Module):
    """A kernel between two layers."""

    def __init__(self, copy: Any, *, only_in_training: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.kernel = Kernel(copy, only_in_training=only_in_training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.kernel(self.first(x)).relu())
