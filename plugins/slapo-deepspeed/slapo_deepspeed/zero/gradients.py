"""Gradients that ZeRO keeps from the last step, and takes for those of a parameter that this step does not use.

DeepSpeed 0.19 writes a gradient over the last one where a step's first micro-batch gives one, and adds it otherwise.
With ZeRO-3, and with an offloaded optimiser, a parameter that only later micro-batches use gets the last step's
gradient added, and one that none uses is stepped with the last step's gradient once more.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["forget_gradients"]


def forget_gradients(engine: Any) -> None:
    """Let a step start from gradients of zero; to be called before its first micro-batch, on every rank.

    Args:
        engine: DeepSpeed's, of any stage.
    """
    optimizer = engine.optimizer
    kept = getattr(optimizer, "grad_partitions_flat_buffer", None)  # of ZeRO-3
    masters: list[torch.Tensor] = []  # whose gradients are copied there as they come
    if getattr(optimizer, "offload_optimizer", False):
        masters += optimizer.fp32_partitioned_groups_flat
    if getattr(optimizer, "cpu_offload", False):
        masters += optimizer.single_partition_of_fp32_groups
    with torch.no_grad():
        if kept is not None:
            kept.zero_()
        for master in masters:
            if master.grad is not None:
                master.grad.zero_()
        for summed in getattr(optimizer, "accumulated_grads_in_cpu", {}).values():
            summed.zero_()
    if masters:
        optimizer.norm_for_param_grads.clear()
