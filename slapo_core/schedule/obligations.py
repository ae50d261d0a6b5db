"""What is still missing in a schedule, as the plugins that it names say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from slapo_core.errors import BuildError, HookError
from slapo_core.spec.violation import Violation

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule

__all__ = ["obligations", "refuse_if_incomplete"]


def obligations(schedule: Schedule) -> tuple[Violation, ...]:
    """Every reason why the schedule, as it stands, certainly trains another model than the untouched one.

    Raises:
        HookError: a plugin's ``slapo_check`` raised, or gave something else than violations.
    """
    found: list[Violation] = []
    for distribution, answer in schedule.hooks.call_each("slapo_check", schedule=schedule):
        given = list(answer) if isinstance(answer, Iterable) and not isinstance(answer, str) else [answer]
        for item in given:
            if not isinstance(item, Violation):
                raise HookError(
                    f"hook slapo_check of {distribution} must yield Violation objects (got {item!r})",
                    plugin=distribution,
                    hint='yield slapo_core.Violation("what is missing", hint="the call to add")',
                )
        found += given
    return tuple(found)


def refuse_if_incomplete(schedule: Schedule) -> None:
    """Refuse a schedule that certainly trains another model.

    Raises:
        BuildError: every reason is given.
    """
    missing = [str(violation) for violation in obligations(schedule)]
    if missing:
        start = "the schedule is incomplete"
        lines = [f"{start}: {missing[0]}"] if len(missing) == 1 else [f"{start}:", *(f"  - {one}" for one in missing)]
        raise BuildError("\n".join(lines))
