"""Access private names of Megatron and torch: only here, under a contract test."""

from __future__ import annotations

import functools
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map as tree_map


def groups_of_megatron() -> list[Any]:
    """Return Megatron's process groups of this rank, each once, in the order in which they were made."""
    from megatron.core import parallel_state

    found = parallel_state._global_process_group_list or []
    return [group for group in found if group is not None]


def is_alive(group: Any) -> bool:
    """Return whether a group still exists: neither it nor its world was destroyed."""
    return dist.is_initialized() and group in dist.distributed_c10d._world.pg_map


def timeout_minutes() -> float:
    """Return the timeout of the default group in minutes, for Megatron's groups."""
    world: Any = dist.group.WORLD
    waits = [
        getattr(getattr(world._get_backend(device), "options", None), "_timeout", None)
        for device in world._device_types
    ]
    longest = max((wait for wait in waits if isinstance(wait, timedelta)), default=timedelta(minutes=30))
    return longest.total_seconds() / 60


def bucket_groups(chunk: Any) -> list[Any]:
    """Return the bucket groups of a chunk in Megatron's DistributedDataParallel."""
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


def ignore_backward(chunk: Any) -> None:
    """Keep backward passes outside of a step from starting reductions, until the next step zeroes gradients."""
    for group in bucket_groups(chunk):
        group.is_last_microbatch = False


def start_of(optimizer: Any, parameter: Tensor) -> int:
    """Return the offset of a distributed optimizer's own shard in the flattened parameter, in elements."""
    return int(optimizer._get_model_param_range_map(parameter)["param"].start)


def tensors_of_megatron_are_on_gpu() -> None:
    """Let ``tensor.cuda()`` and ``tensor.type()`` answer modules of Megatron as on a GPU, until the process ends.

    For a process that simulates a rank; all other callers get torch's own methods.
    """
    if "type" in vars(Tensor):
        return
    moved, kind = Tensor.cuda, Tensor.type

    def cuda(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self if _is_called_by_megatron() else moved(self, *args, **kwargs)

    def type_(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = kind(self, *args, **kwargs)
        if not args and not kwargs and _is_called_by_megatron():
            return found.replace("torch.", "torch.cuda.", 1)
        return found

    Tensor.cuda, Tensor.type = _Method("cuda", cuda), _Method("type", type_)  # type: ignore[method-assign, assignment]


class _Method:
    """A method of tensors whose signature traces and patterns do not read, like a method of torch."""

    def __init__(self, name: str, function: Any) -> None:
        self.__name__, self._function = name, function

    def __get__(self, tensor: Tensor | None, owner: Any = None) -> Any:
        return self if tensor is None else functools.partial(self._function, tensor)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def _is_called_by_megatron() -> bool:
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("megatron")
