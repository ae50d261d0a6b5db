"""Fill in what the schedule, the arguments of ``build``, and defaults decide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slapo_core import BuildError

if TYPE_CHECKING:
    from slapo_core.spec.request import ScheduledModel

__all__ = ["OPTIONS", "filled"]

OPTIONS = ("optimizer_config", "ddp_config", "model_parallel_config", "scheduler", "microbatches", "batch_axes")


def filled(schedule: ScheduledModel, config: Mapping[str, Any]) -> dict[str, Any]:
    """The options with everything that is decided.

    Args:
        schedule: what is built.
        config: the options of the user, with ``"arguments"`` of ``build``.

    Raises:
        BuildError: an option that there is none.
    """
    for name in config:
        if name not in (*OPTIONS, "arguments"):
            raise BuildError(f"target 'megatron' has no option {name!r}; it has {', '.join(OPTIONS)}")
    arguments = config.get("arguments")
    optimizer = {"clip_grad": 0.0, **(config.get("optimizer_config") or {})}
    if arguments is not None and arguments.max_grad_norm is not None:
        optimizer["clip_grad"] = arguments.max_grad_norm
    return {
        "optimizer_config": optimizer,
        "ddp_config": dict(config.get("ddp_config") or {}),
        "model_parallel_config": dict(config.get("model_parallel_config") or {}),
        "scheduler": dict(config.get("scheduler") or {}),
        "microbatches": config.get("microbatches") or (arguments.accumulate if arguments is not None else 1),
        "batch_axes": dict(config.get("batch_axes") or {}),
    }
