"""Names of torch that are not public and that this plugin needs: what a new version of torch may change is here."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "buffers_of", "children_of", "non_persistent_buffers_of", "pytree", "schedule_actions"]

buffers_of: Callable[[nn.Module], dict[str, torch.Tensor | None]] = attrgetter("_buffers")
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
non_persistent_buffers_of: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")


def schedule_actions(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> list[list[Any]]:
    """The actions of each rank in torch's schedule of a name.

    Raises:
        AssertionError: the schedule does not take these numbers; ValueError likewise.
    """
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    return get_schedule_ops(name, ranks, microbatches, stages_per_rank)
