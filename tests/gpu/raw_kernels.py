"""A kernel that is launched on the addresses of its tensors: by Triton on CUDA, on the CPU by a loop over memory.

Like any code that takes ``data_ptr()``, it is not what torch could run on tensors without memory.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

try:
    import triton
    import triton.language as tl
except ImportError:  # as on machines without a GPU
    triton = None

__all__ = ["Launching", "Operating", "Residual", "Shifted", "add", "launched", "operator"]

if triton is not None:

    @triton.jit
    def _add(x, y, out, size, BLOCK: tl.constexpr):
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = place < size
        tl.store(out + place, tl.load(x + place, mask=inside) + tl.load(y + place, mask=inside), mask=inside)


_NUMBERS: dict[torch.dtype, Any] = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}


def launched(x: Tensor, y: Tensor) -> Tensor:
    """``x + y`` of two contiguous tensors of one shape; autograd sees nothing of it."""
    out = torch.empty_like(x)
    if x.device.type == "cuda":
        _add[(triton.cdiv(out.numel(), 256),)](x, y, out, out.numel(), BLOCK=256)
        return out
    addresses = [tensor.data_ptr() for tensor in (x, y, out)]
    if not all(addresses):
        raise AssertionError("a kernel was launched on address 0")  # of a GPU: an illegal memory access
    first, second, sums = [(_NUMBERS[x.dtype] * x.numel()).from_address(address) for address in addresses]
    for number in range(len(sums)):
        sums[number] = first[number] + second[number]
    return out


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, y: Tensor) -> Tensor:
        return launched(x.contiguous(), y.contiguous())

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0]


def add(x: Tensor, y: Tensor) -> Tensor:
    """``x + y`` with its gradient."""
    return _Add.apply(x, y)  # type: ignore[no-any-return]


class Launching(nn.Module):
    """Launches the kernel in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return launched(x, x)


class Shifted(nn.Module):
    """A sum with a parameter of the shape of what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class Residual(nn.Module):
    """What the kernel could compute, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x


@torch.library.custom_op("slapo_gpu_tests::add", mutates_args=())
def operator(x: Tensor, y: Tensor) -> Tensor:
    """The kernel as an operator, whose shape torch knows without running it."""
    return launched(x.contiguous(), y.contiguous())


@operator.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(x)


operator.register_autograd(lambda context, gradient: (gradient, gradient))


class Operating(nn.Module):
    """Calls the operator in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return operator(x, x)  # type: ignore[no-any-return]
