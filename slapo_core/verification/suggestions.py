"""What plugins suggest to try, when a schedule is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from slapo_core.errors import HookError
from slapo_core.spec.suggestion import Suggestion

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule

__all__ = ["suggestions"]


def suggestions(schedule: Schedule, gradients: Sequence[str]) -> list[Suggestion]:
    """What the plugins that a schedule names would write in other words.

    Raises:
        HookError: a plugin's ``slapo_suggest`` raised, or gave something else than suggestions.
    """
    found: list[Suggestion] = []
    for distribution, answer in schedule.hooks.call_each(
        "slapo_suggest", schedule=schedule, gradients=tuple(gradients)
    ):
        given = list(answer) if isinstance(answer, Iterable) and not isinstance(answer, str) else [answer]
        for item in given:
            if not isinstance(item, Suggestion):
                raise HookError(
                    f"hook slapo_suggest of {distribution} must yield Suggestion objects (got {item!r})",
                    plugin=distribution,
                    hint="yield Suggestion((Change(path, primitive),))",
                )
        found += given
    return found
