"""Matches in a saved schedule: where, what pattern, which of how many; the rest is found again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slapo_core.errors import ReplayError, SerializationError
from slapo_core.spec.graph import Match

if TYPE_CHECKING:
    from slapo_core.graph.patterns.pattern import GraphPattern
    from slapo_core.schedule.saved_patterns import SavedPatterns


def matches_to_json(value: Any, patterns: list[GraphPattern] | None = None) -> list[dict[str, Any]]:
    """As JSON values.

    Args:
        value: the matches.
        patterns: theirs are put there, where they are not yet, and named by their numbers; None writes them out.

    Raises:
        SerializationError: a pattern holds what cannot be named; or there are no matches yet, but a pattern: the
            primitive was never applied.
    """
    matches = (value,) if isinstance(value, Match) else value
    if not isinstance(matches, tuple | list) or not all(isinstance(match, Match) for match in matches):
        raise SerializationError(
            f"the pattern {value!r} was not looked for yet", hint="save the schedule that the step was applied in"
        )
    return [
        {
            "path": match.path,
            "pattern": match.pattern.to_data() if patterns is None else _number(match.pattern, patterns),
            "index": match.index,
            "total": match.total,
        }
        for match in matches
    ]


def _number(pattern: GraphPattern, patterns: list[GraphPattern]) -> int:
    if pattern not in patterns:
        patterns.append(pattern)
    return patterns.index(pattern)


def matches_from_json(value: Any, *, where: str, patterns: SavedPatterns) -> tuple[Match, ...]:
    """What :func:`matches_to_json` gave, to be located when the step is applied.

    Raises:
        ReplayError: it is malformed.
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ReplayError(f"{where} is no list of matches (got {value!r})")
    found = []
    for each in value:
        numbers = (each.get("index"), each.get("total")) if isinstance(each, Mapping) else ()
        is_sound = len(numbers) == 2 and all(type(number) is int for number in numbers)
        if not is_sound or not isinstance(each.get("path"), str) or not 0 <= each["index"] < each["total"]:
            raise ReplayError(f"{where} holds what is no match: {each!r}")
        pattern = patterns.get(each.get("pattern"), where=where)
        found.append(Match(each["path"], pattern, each["index"], each["total"]))
    return tuple(found)
