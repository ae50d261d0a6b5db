"""The user's DeepSpeed configuration, with what the schedule decides filled in."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slapo_core.spec.request import ScheduledModel

__all__ = ["filled"]


def filled(schedule: ScheduledModel, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the dialect, filled in: ``{"config": {...}, "batch_axes": {...}}``; pure.

    Args:
        schedule: what is built.
        options: as the user gave them to ``build``, or as an earlier call made them.
    """
    config = copy.deepcopy(dict(options.get("config") or {}))
    config.setdefault("train_micro_batch_size_per_gpu", 1)
    config.setdefault("gradient_accumulation_steps", 1)
    config.setdefault("steps_per_print", 10**9)
    config.setdefault("zero_allow_untested_optimizer", True)
    mesh = schedule.mesh
    if mesh is not None and mesh.size("pp") > 1:
        config.setdefault("zero_optimization", {"stage": 1})
        config["pipeline"] = {"use_reentrant": False, "pipe_partitioned": False, "grad_partitioned": False}
    return {"config": config, "batch_axes": dict(options.get("batch_axes") or {})}
