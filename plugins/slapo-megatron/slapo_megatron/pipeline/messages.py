"""The messages that one rank gets in a step, in the order in which Megatron's schedules send them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from slapo_core.spec.stage_runner import RankStages

__all__ = ["Messages", "messages_of", "order_of"]


@dataclass(frozen=True)
class Messages:
    """What comes to a rank.

    Args:
        from_previous: numbers of elements of what its stages are sent.
        from_next: of the gradients of what they send.
        dtype: of all.
        device: where stages compute.
    """

    from_previous: Sequence[int]
    from_next: Sequence[int]
    dtype: torch.dtype
    device: torch.device


def order_of(chunks: int, count: int, group: int) -> list[int]:
    """The place among its stages of what a rank runs, one after the other: the same on all ranks.

    Args:
        chunks: stages of a rank.
        count: of micro-batches.
        group: how many of these a stage runs before the rank goes on to its next one.
    """
    found = []
    for start in range(0, count, group):
        for chunk in range(chunks):
            found += [chunk] * min(group, count - start)
    return found


def messages_of(form: RankStages, rank: int, size: int, order: Sequence[int]) -> Messages:
    """What comes to a rank in a step.

    Args:
        form: of the micro-batches, with joined messages.
        rank: along ``pp``.
        size: of that mesh dimension.
        order: as :func:`order_of` gives it; gradients come with the last stage first.
    """
    lengths = {stage: parcel.length for stage, parcel in form.messages.items()}
    previous, following = (rank - 1) % size, (rank + 1) % size
    last = max(order)
    sent = (chunk * size + previous for chunk in order)
    returned = ((last - chunk) * size + following - 1 for chunk in order)
    dtype = next(iter(form.messages.values())).dtype
    return Messages(
        [lengths[stage] for stage in sent if stage in lengths],
        [lengths[stage] for stage in returned if stage in lengths],
        dtype,
        form.device,
    )
