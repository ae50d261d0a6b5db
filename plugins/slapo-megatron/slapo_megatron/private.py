"""Names of Megatron and torch that are not public and that this plugin needs: what a new version may change is here."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves as tree_leaves, tree_map as tree_map

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
