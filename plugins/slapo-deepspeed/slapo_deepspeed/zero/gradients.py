"""Clear stale ZeRO gradients of parameters that a step does not use.

DeepSpeed 0.19 writes a gradient over the last one where a step's first micro-batch gives one, and adds it otherwise.
With ZeRO-3, and with an offloaded optimizer, a parameter that only later micro-batches use gets the last step's
gradient added, and one that none uses is stepped with the last step's gradient once more."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from slapo_runtime.engine import UnusedParameters

if TYPE_CHECKING:
    from slapo_runtime.context import BuildContext


def forget_gradients(engine: Any) -> None:
    """Let a step start from gradients of zero; to be called before its first micro-batch, on every rank.

    Args:
        engine: DeepSpeed's, of any stage.
    """
    optimizer = engine.optimizer
    kept = getattr(optimizer, "grad_partitions_flat_buffer", None)  # of ZeRO-3
    main_weights: list[torch.Tensor] = []  # whose gradients are copied there as they come
    if getattr(optimizer, "offload_optimizer", False):
        main_weights += optimizer.fp32_partitioned_groups_flat
    if getattr(optimizer, "cpu_offload", False):
        main_weights += optimizer.single_partition_of_fp32_groups
    with torch.no_grad():
        if kept is not None:
            kept.zero_()
        for main in main_weights:
            if main.grad is not None:
                main.grad.zero_()
        for summed in getattr(optimizer, "accumulated_grads_in_cpu", {}).values():
            summed.zero_()
    if main_weights:
        optimizer.norm_for_param_grads.clear()


_USED = {"offload_optimizer": "_offload_boundary_param_ids", "cpu_offload": "_offload_accumulated_param_ids"}
"""Names by which DeepSpeed's optimizers mark offloading -> those of the gradients of a step."""


@contextlib.contextmanager
def last_micro_batch(engine: Any) -> Iterator[None]:
    """Wrap the backward pass of a step's last micro-batch.

    An offloaded optimizer takes the gradients that this pass gives, summed; what only earlier ones gave it would leave.

    Args:
        engine: DeepSpeed's, of any stage.
    """
    optimizer = engine.optimizer
    name = next((used for said, used in _USED.items() if getattr(optimizer, said, False)), None)
    if name is None:
        yield
        return
    earlier = getattr(optimizer, name)
    setattr(optimizer, name, set())
    yield
    now = getattr(optimizer, name)
    if earlier - now:
        setattr(optimizer, name, earlier - now)
        optimizer.finalize_gradient_accumulation_boundary()
    setattr(optimizer, name, earlier | now)


def unused_parameters(context: BuildContext, engine: Any) -> UnusedParameters:
    """Make the guard against unused parameters.

    Not in full precision without ZeRO, on one replica: there the optimizer is torch's, on the model's gradients.

    Args:
        context: of the build.
        engine: DeepSpeed's.
    """
    low = engine.fp16_enabled() or engine.bfloat16_enabled()
    with_zeros = engine.optimizer is not None and (engine.zero_optimization() or low or engine.dp_world_size > 1)
    return UnusedParameters(context, "DeepSpeed", steps_with_zeros=bool(with_zeros))
