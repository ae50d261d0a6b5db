"""Wrap the private names of torch; tests/core/test_private.py checks them against the installed version."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException as DataDependentOutputException,
    DynamicOutputShapeException as DynamicOutputShapeException,
    FakeTensor as FakeTensor,
    FakeTensorMode as FakeTensorMode,
    UnsupportedOperatorException as UnsupportedOperatorException,
    unset_fake_temporarily as unset_fake_temporarily,
)
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode as TorchDispatchMode,
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
)
from torch.utils.flop_counter import flop_registry


@contextmanager
def attention_of_cuda() -> Iterator[None]:
    """While it lasts, attention of tensors on the CPU, which must be fake, is the memory-efficient operator of CUDA.

    What that does not take (other than four axes, float64, heads of a key that serve several queries) stays as it is.
    Flash attention keeps and computes the same.
    """
    overrides = torch.library.Library("aten", "IMPL")
    overrides.impl("scaled_dot_product_attention", _memory_efficient, "AutogradCPU")
    try:
        yield
    finally:
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
        whole = torch.ops.aten.scaled_dot_product_attention.default
        return whole.decompose(  # type: ignore[no-any-return]
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


def current_autograd_node() -> Any:
    """The node whose backward runs; None outside of backward passes."""
    return torch._C._current_autograd_node() if torch._C._current_graph_task_id() != -1 else None


def next_sequence_number() -> int:
    """Return the number of this thread's next autograd node."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def sequence_number(node: Any) -> int:
    """Return the position of an autograd node in its thread's order of creation; ``2**64 - 1`` for leaves."""
    number: int = node._sequence_nr()
    return number


def ranks_of_group(group: Any) -> tuple[int, ...]:
    """The global ranks of a process group, in its order.

    Args:
        group: as operations are given it: its name, the group itself, or the group boxed for an operator.
    """
    if isinstance(group, str):
        group = distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    elif not isinstance(group, dist.ProcessGroup):
        group = dist.ProcessGroup.unbox(group)
    return tuple(dist.get_process_group_ranks(group))


def bucket_assignment(tensors: Sequence[torch.Tensor], limit: int) -> list[list[int]]:
    """Which gradients DistributedDataParallel exchanges at once.

    Args:
        tensors: in the order in which they are put into buckets; those of one type go together.
        limit: bytes at which a bucket is full.

    Returns:
        the positions of each bucket's tensors, in the order in which buckets get full.
    """
    positions = list(range(len(tensors)))
    buckets, _ = dist._compute_bucket_assignment_by_size(list(tensors), [limit], [False] * len(tensors), positions)
    return [list(bucket) for bucket in buckets]


def run_backward(roots: tuple[torch.Tensor, ...], cotangents: tuple[torch.Tensor, ...]) -> None:
    """Run autograd's engine itself, with the active torch-function modes."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward(roots, cotangents, False, False, (), allow_unreachable=True, accumulate_grad=True)


def flop_formulas() -> dict[Any, Callable[..., int]]:
    """Operator, with all its overloads -> floating-point operations, by its arguments and ``out_val``, its result."""
    return dict(flop_registry)


def is_functorch_wrapped(tensor: torch.Tensor) -> bool:
    """Return whether functorch wraps a tensor (vmap, grad), so that its values cannot be read."""
    functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
    return bool(functorch.is_functorch_wrapped_tensor(tensor))


def active_function_modes() -> list[Any]:
    """Return the active torch-function modes, the outermost first."""
    if not torch._C._len_torch_function_stack():
        return []
    return torch.overrides._get_current_function_mode_stack()  # type: ignore[no-any-return]


def default_store() -> Any:
    """Return the store of the default process group."""
    return distributed_c10d._get_default_store()


def new_group_among(original: Any, store: Any, name: str, timeout: timedelta) -> Any:
    """Make a process group with the ranks and backend of another one, called by its members only.

    All processes must call ``torch.distributed.new_group``, or it derives the group's name from the number of groups of
    each process. Such a name returns with a later group, which then finds the addresses of the closed one.
    """
    ranks = dist.get_process_group_ranks(original)
    group, _ = distributed_c10d._new_process_group_helper(  # type: ignore[attr-defined]
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        distributed_c10d._world.pg_map[original][0],
        store,
        name,  # type: ignore[arg-type]
        timeout=timeout,
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Set the timeout of a group's collectives."""
    distributed_c10d._set_pg_timeout(timeout, group)  # type: ignore[attr-defined]


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
ADDED_PRODUCT = torch.ops.aten._addmm_activation
"""Operators without a formula in ``flop_formulas``."""

tree_flatten, tree_leaves = pytree.tree_flatten, pytree.tree_leaves
tree_map_only, tree_unflatten = pytree.tree_map_only, pytree.tree_unflatten

# -- tables of nn.Module -----------------------------------------------------------------------------------------


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the live table of a module's own parameters by name; None for unset ones."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the live table of a module's own buffers by name; None for unset ones."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the live table of a module's children by name; None for unset ones."""
    return module._modules


def tables_of(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """Return the live tables of parameters, buffers and children."""
    return module._parameters, module._buffers, module._modules


def call_hooks_of(module: nn.Module) -> tuple[dict[int, Callable[..., Any]], ...]:
    """Return the live tables of the hooks that run when a module is called, and in its backward pass."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def non_persistent_buffers_of(module: nn.Module) -> set[str]:
    """Return the live table of the names of a module's buffers that state dicts leave out."""
    return module._non_persistent_buffers_set


TENSOR_TABLES = ("_parameters", "_buffers")
"""Attributes of a module that hold its tensors by name."""
HOOK_TABLES: dict[str, tuple[str, ...]] = {
    "forward_pre": ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    "forward": ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "full_backward_pre": ("_backward_pre_hooks",),
    "full_backward": ("_backward_hooks",),
}
"""Kind of hook -> the tables that its registration writes to, the functions' first."""
ALL_HOOK_TABLES = {
    **HOOK_TABLES,
    "state_dict_pre": ("_state_dict_pre_hooks",),
    "load_state_dict_pre": ("_load_state_dict_pre_hooks",),
}
TENSOR_HOOK_TABLES = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}
"""Table of a tensor's hooks -> the method that registers one."""


def hooks_of(module: nn.Module) -> dict[Any, dict[int, Callable[..., Any]]]:
    """Return the live hook tables of a module by kind."""
    return {kind: getattr(module, tables[0]) for kind, tables in HOOK_TABLES.items()}


def full_backward_flag(module: nn.Module) -> bool | None:
    """Return False if the backward hooks are of the deprecated kind; None if none was ever registered."""
    return module._is_full_backward_hook


def set_full_backward_flag(module: nn.Module, flag: bool | None) -> None:
    """Set the kind of a module's backward hooks."""
    module._is_full_backward_hook = flag


def apply_to_tensors(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Convert a module's parameters and buffers in place, as ``module.to`` does."""
    return module._apply(function)


def refresh_flat_weights(module: nn.RNNBase) -> None:
    """Refresh the further references to its parameters that an RNN keeps."""
    module._init_flat_weights()


def active_ddp() -> Any:
    """Return the DistributedDataParallel whose forward runs; None outside."""
    return torch.nn.parallel.DistributedDataParallel._active_ddp_module  # type: ignore[attr-defined]


# -- tensors and operators ---------------------------------------------------------------------------------------


def write_count(tensor: torch.Tensor) -> int:
    """Return a number that changes with every in-place write to a tensor or its views."""
    return tensor._version


def storage_id(holder: torch.Tensor | torch.UntypedStorage) -> int:
    """Return the identity of a storage, which views share; of a tensor itself if it is not strided."""
    if isinstance(holder, torch.Tensor):
        return holder.untyped_storage()._cdata if holder.layout is torch.strided else id(holder)
    return holder._cdata


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices and values of a COO tensor, coalesced or not."""
    return tensor._indices(), tensor._values()


def schema_of(operator: Any) -> Any:
    """Return the schema of an operator overload; None for another callable."""
    return getattr(operator, "_schema", None)
