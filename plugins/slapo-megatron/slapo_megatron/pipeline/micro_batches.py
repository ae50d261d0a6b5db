"""How many micro-batches Megatron's interleaved schedule takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slapo_core import BuildError

__all__ = ["check_micro_batches"]

_GROUP = "microbatch_group_size_per_vp_stage"


def check_micro_batches(options: Mapping[str, Any], stages: int, pp: int) -> None:
    """Refuse what Megatron's schedule would refuse in the first step.

    Args:
        options: of the plan.
        stages: of the model.
        pp: the size of that mesh dimension.

    Raises:
        BuildError: a rank has several stages, and they take another number of micro-batches.
    """
    count: int = options["microbatches"]
    if stages <= pp:
        return
    group: int = options["model_parallel_config"].get(_GROUP) or pp
    runs = f"each rank runs {stages // pp} stages in turn, {group} micro-batches each time"
    if count < pp:
        raise BuildError(
            f"{runs}, and microbatches={count} is less than pp size {pp}",
            hint=f"microbatches={pp}, or a multiple of it",
        )
    if not pp <= group <= count:
        raise BuildError(
            f"{runs} ({_GROUP}), which has to be from pp size {pp} to microbatches={count}",
            hint=f'model_parallel_config={{"{_GROUP}": {pp}}}',
        )
    rest = count % group
    if 0 < rest < pp:
        raise BuildError(
            f"{runs}, which leaves {rest} of microbatches={count}, fewer than pp size {pp}",
            hint=f"microbatches={count - rest} or {count - rest + group}",
        )
