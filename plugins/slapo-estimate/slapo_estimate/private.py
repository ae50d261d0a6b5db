"""Wrap the private names of torch that this distribution uses; its tests check them against the installed version."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import (
    DataDependentOutputException as DataDependentOutputException,
    DynamicOutputShapeException as DynamicOutputShapeException,
    FakeTensor as FakeTensor,
    FakeTensorMode as FakeTensorMode,
    UnsupportedOperatorException as UnsupportedOperatorException,
    unset_fake_temporarily as unset_fake_temporarily,
)
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import (
    tree_flatten as tree_flatten,
    tree_leaves as tree_leaves,
    tree_map_only as tree_map_only,
    tree_unflatten as tree_unflatten,
)
from torch.utils.flop_counter import flop_registry

from slapo_core.layout import simulated_device
from slapo_core.observers import ONE_KERNEL, PATCHING, run_from


@contextmanager
def kernels_of_cuda() -> Iterator[None]:
    """Run fake tensors on the CPU by the kernels of CUDA where they differ.

    Attention is CUDA's memory-efficient operator; arguments that it refuses (not four axes, float64, grouped queries)
    keep the operator of the CPU. FlashAttention keeps and computes the same. A root mean square norm is one kernel.
    Code that asks `slapo_core.layout.kernel_device` chooses its own.
    """
    overrides = torch.library.Library("aten", "IMPL")
    overrides.impl("scaled_dot_product_attention", _memory_efficient, "AutogradCPU")
    composite = torch.ops.aten.rms_norm.default.decompose
    overrides.impl("rms_norm", partial(run_from, ONE_KERNEL, composite), "AutogradCPU")
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::addmm.dtype_out", "Meta"):  # torch 2.11
        overrides.impl("addmm.dtype_out", lambda *_, out, **__: out, "Meta")
    add_product = torch.ops.aten.addmm.dtype_out
    decomposition = decomposition_table.pop(add_product, None)  # which takes no type in torch 2.11
    try:
        with simulated_device("cuda"):
            yield
    finally:
        if decomposition is not None:
            decomposition_table[add_product] = decomposition
        overrides._destroy()


def _memory_efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if query.dim() != 4 or query.dtype == torch.float64 or enable_gqa:
        attention = torch.ops.aten.scaled_dot_product_attention.default
        return attention.decompose(  # type: ignore[no-any-return]
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    keeps = any(each.requires_grad for each in (query, key, value))
    out, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, keeps, dropout_p, is_causal, scale=scale
    )
    return out  # type: ignore[no-any-return]


@contextmanager
def runtimes_without_memory() -> Iterator[None]:
    """Let a runtime's engine run on fake tensors, in a process that simulates one rank.

    ``module.to(...)`` replaces the data of parameters: torch would swap fake ones, which weak references forbid. An
    exchange of objects returns this rank's own object for each rank.
    """

    def converted(self: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for module in self.modules() if recurse else (self,):
            with torch.no_grad():
                for parameter in module._parameters.values():
                    if parameter is not None:
                        parameter.data = function(parameter)
                for name, buffer in module._buffers.items():
                    module._buffers[name] = None if buffer is None else function(buffer)
        return self

    def gathered(object_list: list[Any], obj: Any, *_: Any, **__: Any) -> None:
        object_list[:] = [obj] * len(object_list)

    with PATCHING:
        own = nn.Module._apply, dist.all_gather_object
        nn.Module._apply, dist.all_gather_object = converted, gathered  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module._apply, dist.all_gather_object = own  # type: ignore[method-assign]


@contextmanager
def replicated_through(make: Callable[[nn.Module, Any, Mapping[str, Any]], Callable[[bool], None]]) -> Iterator[None]:
    """Replace the reducer of ``DistributedDataParallel``, which reads tensors in C++ and cannot run on fake ones.

    Args:
        make: called with a module, the group of its replicas and the options; returns a function that prepares a
            forward, called with whether its backward exchanges gradients.
    """

    def wrap(self: DistributedDataParallel, module: nn.Module, process_group: Any, **options: Any) -> None:
        nn.Module.__init__(self)
        self.module, self.require_backward_grad_sync = module, True
        self.__dict__["_slapo_prepare"] = make(module, process_group, options)

    def forward(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["_slapo_prepare"](self.require_backward_grad_sync)
        return self.module(*args, **kwargs)

    with PATCHING:
        own = DistributedDataParallel.__init__, DistributedDataParallel.forward
        wrapping = wraps(own[0])(wrap)  # with its signature, which tells the options
        DistributedDataParallel.__init__, DistributedDataParallel.forward = wrapping, forward  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            DistributedDataParallel.__init__, DistributedDataParallel.forward = own  # type: ignore[method-assign]


def bucket_assignment(tensors: Sequence[torch.Tensor], limit: int) -> list[list[int]]:
    """Assign tensors to the buckets of DistributedDataParallel.

    Args:
        tensors: in the order of assignment; each bucket has one dtype.
        limit: bytes at which a bucket is full.

    Returns:
        the positions of each bucket's tensors, in the order in which buckets become full.
    """
    positions = list(range(len(tensors)))
    buckets, _ = dist._compute_bucket_assignment_by_size(list(tensors), [limit], [False] * len(tensors), positions)
    return [list(bucket) for bucket in buckets]


def flop_formulas() -> dict[Any, Callable[..., int]]:
    """Return operator packet -> FLOPs, a function of arguments and result (``out_val``)."""
    return dict(flop_registry)


LOCAL_SCALAR = torch.ops.aten._local_scalar_dense.default
"""The operator that reads the value of a tensor of one element."""

ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable,
)

ATTENTION_BACKWARD = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward,
)

MATRIX_PRODUCTS = (torch.ops.aten._grouped_mm, torch.ops.aten._scaled_grouped_mm, torch.ops.aten._int_mm)

ADDED_PRODUCTS = (
    *(torch.ops.aten._addmm_activation, torch.ops.aten.addbmm, torch.ops.aten.addbmm_),
    *(torch.ops.aten.addmm, torch.ops.aten.addmm_, torch.ops.aten.baddbmm, torch.ops.aten.baddbmm_),
)
"""Operators without a formula in ``flop_formulas``, or with one that refuses some of their overloads."""


def storage_id(holder: torch.Tensor | torch.UntypedStorage) -> int:
    """Return the identity of a storage, which views share; of the tensor if it is not strided."""
    if isinstance(holder, torch.Tensor):
        return holder.untyped_storage()._cdata if holder.layout is torch.strided else id(holder)
    return holder._cdata


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices and values of a COO tensor, coalesced or not."""
    return tensor._indices(), tensor._values()


def schema_of(operator: Any) -> Any:
    """Return the schema of an operator overload; None for another callable."""
    return getattr(operator, "_schema", None)
