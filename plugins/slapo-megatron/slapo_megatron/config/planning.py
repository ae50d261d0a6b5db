"""What a plan says, line by line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slapo_core.spec.request import ScheduledModel

__all__ = ["steps_of"]


def steps_of(schedule: ScheduledModel, options: Mapping[str, Any]) -> Iterator[str]:
    """The lines of the plan.

    Args:
        schedule: what is built.
        options: as :func:`slapo_megatron.config.filling.filled` made them.
    """
    yield f"the scheduled {type(schedule.model).__name__}, {len(schedule.records)} steps applied"
