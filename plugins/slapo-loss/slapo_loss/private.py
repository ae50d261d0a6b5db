"""Wrap the private names of torch that this distribution uses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch._guards import detect_fake_mode as detect_fake_mode

from slapo_core.layout import kernel_device


def keeps_graph() -> bool:
    """Return whether the running backward keeps its graph (``retain_graph=True``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def is_transformed() -> bool:
    """Return whether a transform of ``torch.func`` (``grad``, ``vmap``) is active."""
    return torch._C._are_functorch_transforms_active()


def without_torch_function() -> AbstractContextManager[None]:
    """Return a context in which tensor subclasses are plain tensors to functions of torch."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()  # type: ignore[assignment]
    return context


def gather_functional(tensor: torch.Tensor, size: int, name: str) -> torch.Tensor:
    """Gather over the ranks of a group: (...) -> (ranks, ...)."""
    ops = torch.ops._c10d_functional
    found = ops.wait_tensor.default(ops.all_gather_into_tensor.default(tensor.contiguous(), size, name))
    return found.view(size, *tensor.shape)


def without_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let torch.compile run a function as it is; torch.compiler.disable would import dynamo at once."""
    return _disable_dynamo(function)


def assert_on_device(condition: torch.Tensor, message: str) -> None:
    """Assert that a tensor of one element is true; on a GPU without waiting."""
    torch.ops.aten._assert_async.msg(condition, message)


def is_cast(between: Callable[[torch.Tensor], torch.Tensor], probe: torch.Tensor) -> tuple[torch.dtype, bool]:
    """Return the type that elementwise operations give, and whether they only cast to a larger one.

    Args:
        between: the operations.
        probe: a small tensor of the type that they take.
    """
    with torch.enable_grad():
        leaf = probe.detach().requires_grad_()
        shown = between(leaf)
    node = shown.grad_fn
    if node is None:
        return shown.dtype, shown is leaf
    source = node.next_functions[0][0]
    is_one = node.name() == "ToCopyBackward0" and source is not None and source.name().endswith("AccumulateGrad")
    return shown.dtype, is_one and torch.promote_types(shown.dtype, leaf.dtype) == shown.dtype


def add_product(sums: torch.Tensor, left: torch.Tensor, right: torch.Tensor, most_bytes: int) -> None:
    """Add ``left.T @ right`` to sums that may be of a larger type, in which the product is summed, too.

    Args:
        sums: (columns of ``left``, columns of ``right``).
        left: its transpose is the first factor.
        right: the second factor.
        most_bytes: of a copy of some of ``left``'s columns in the larger type, where the device needs one.
    """
    if sums.dtype == left.dtype:
        sums.addmm_(left.t(), right)
    elif _sums_in(sums.dtype, left):
        torch.ops.aten.addmm.dtype_out(sums, left.t(), right, sums.dtype, out=sums)
    else:  # some columns at a time, because they are cast
        right = right.to(sums.dtype)
        step = max(1, most_bytes // max(1, left.shape[0] * sums.dtype.itemsize))
        for start in range(0, left.shape[1], step):
            columns = slice(start, start + step)
            sums[columns].addmm_(left[:, columns].to(sums.dtype).t(), right)


def product(left: torch.Tensor, right: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    """Return ``left @ right * factors``, which a GPU rounds once only.

    Args:
        left: (rows, inner).
        right: (inner, columns).
        factors: (rows, 1), of the type of sums of the others; None: 1.
    """
    if factors is None:
        return torch.mm(left, right)
    if _sums_in(factors.dtype, left):
        return torch.ops.aten.mm.dtype(left, right, factors.dtype) * factors
    return torch.mm(left, right).mul_(factors)


def _sums_in(dtype: torch.dtype, factor: torch.Tensor) -> bool:
    """Return whether a product has an operator that sums in a larger type than the factors'."""
    is_small = factor.dtype in (torch.float16, torch.bfloat16)
    return kernel_device(factor).type == "cuda" and is_small and dtype == torch.float32


def find_group(name: Any) -> Any:
    """Return the process group of a name."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)


def all_reduce_functional(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Sum over the ranks of a group."""
    ops = torch.ops._c10d_functional
    found: torch.Tensor = ops.wait_tensor.default(ops.all_reduce.default(tensor.contiguous(), "sum", name))
    return found
