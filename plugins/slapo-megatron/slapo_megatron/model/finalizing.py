"""What happens to gradients after the last micro-batch. Imports Megatron: import it in functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.distributed import finalize_model_grads

from slapo_megatron.model.buckets import refuse_missing

__all__ = ["finalizer"]


def finalizer(sum_ties: Callable[[], None] | None = None) -> Callable[..., None]:
    """What Megatron's schedules call: its own function, and then our sum over the stages that hold one parameter.

    Args:
        sum_ties: sums ``main_grad`` of every parameter that several stages hold, over exactly those; None without a
            pipeline. Gradients are averaged over the replicas by then.

    Returns:
        for ``config.finalize_model_grads_func``.
    """

    def finalize(model: list[Any], *args: Any, **kwargs: Any) -> None:
        refuse_missing(model)
        finalize_model_grads(model, *args, **kwargs)
        if sum_ties is not None:
            sum_ties()

    return finalize
