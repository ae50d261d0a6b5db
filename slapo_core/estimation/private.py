"""Names of torch that are not public; a test holds them against the installed version."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.flop_counter import flop_registry

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeStore",
    "FakeTensor",
    "FakeTensorMode",
    "UnsupportedOperatorException",
    "attention_of_cuda",
    "bucket_assignment",
    "current_autograd_node",
    "flop_formulas",
    "is_traceable_wrapper_subclass",
    "next_sequence_number",
    "ranks_of_group",
    "unset_fake_temporarily",
]


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
    """Return the ``_sequence_nr()`` of this thread's next autograd node."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def ranks_of_group(group: Any) -> tuple[int, ...]:
    """The global ranks of a process group, in its order.

    Args:
        group: as operations are given it: its name, the group itself, or the group boxed for an operator.
    """
    if isinstance(group, str):
        group = _resolve_process_group(group)  # type: ignore[arg-type]
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


def flop_formulas() -> dict[Any, Callable[..., int]]:
    """Operator, with all its overloads -> floating-point operations, by its arguments and ``out_val``, its result."""
    return dict(flop_registry)
