"""Check Megatron's gradient buckets under overlapped reduction.

Its attributes of buckets are undocumented; a contract test of this plugin covers them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slapo_core import BuildError

_SHOWN = 5


def refuse_missing(chunks: Sequence[Any]) -> None:
    """Refuse what Megatron fails an assertion at, now or in the next step; without ``overlap_grad_reduce`` nothing is.

    Args:
        chunks: wrapped, after the last backward pass of a step.

    Raises:
        BuildError: the last micro-batch gave parameters no gradient, which their bucket waits for.
    """
    missing = []
    for chunk in chunks:
        if not chunk.ddp_config.overlap_grad_reduce:
            continue
        waited = {
            id(one) for group in _groups(chunk) for one in group.params - group.per_param_grad_ready_counts.keys()
        }
        missing += [name for name, one in chunk.module.model.named_parameters() if id(one) in waited]
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise BuildError(
            f"the last micro-batch of a step gave {', '.join(map(repr, missing[:_SHOWN]))}{more} no gradient, and with "
            "overlap_grad_reduce Megatron waits for that of every parameter in each step",
            hint="set requires_grad=False on unused parameters before build; or "
            'ddp_config={"overlap_grad_reduce": False}',
        )


def drop_started(chunks: Sequence[Any]) -> None:
    """After a failed step, wait for started reductions and drop them, so that the next step starts afresh.

    Args:
        chunks: wrapped.
    """
    for chunk in chunks:
        for group in _groups(chunk):
            if group.grad_reduce_handle is not None:
                group.grad_reduce_handle.wait()
                group.grad_reduce_handle = None
            group.per_param_grad_ready_counts = {}
            group.is_last_microbatch = True


def _groups(chunk: Any) -> list[Any]:
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
