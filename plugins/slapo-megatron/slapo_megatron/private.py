"""Names of Megatron and torch that are not public and that this plugin needs: what a new version may change is here."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map as tree_map

children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")


def groups_of_megatron() -> list[Any]:
    """Every process group of Megatron's that this rank is in, each once, in the order in which they were made."""
    from megatron.core import parallel_state

    found = parallel_state._global_process_group_list or []
    return [group for group in found if group is not None]


def is_alive(group: Any) -> bool:
    """Whether torch.distributed still knows the group: neither it nor its world was destroyed."""
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
    """Every bucket group of a chunk in Megatron's DistributedDataParallel."""
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


def ignore_backward(chunk: Any) -> None:
    """Let backward passes outside of a step start no reduction, until the gradients of the next step are zeroed."""
    for group in bucket_groups(chunk):
        group.is_last_microbatch = False


def start_of(optimizer: Any, parameter: Tensor) -> int:
    """Return the offset of a distributed optimizer's own shard in the flattened parameter, in elements."""
    return int(optimizer._get_model_param_range_map(parameter)["param"].start)


def tensors_of_megatron_are_on_gpu() -> None:
    """Let ``tensor.cuda()`` and ``tensor.type()`` answer modules of Megatron as on a GPU, for good.

    For a process that only simulates a rank; torch's own methods for all other callers.
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
    """A method of tensors. Unlike a function's, its signature is not read by traces and patterns, as of torch's own."""

    def __init__(self, name: str, function: Any) -> None:
        self.__name__, self._function = name, function

    def __get__(self, tensor: Tensor | None, owner: Any = None) -> Any:
        return self if tensor is None else functools.partial(self._function, tensor)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def _is_called_by_megatron() -> bool:
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("megatron")
