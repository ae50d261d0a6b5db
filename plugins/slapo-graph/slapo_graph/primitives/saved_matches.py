"""Matches and their patterns in saved schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slapo_core.errors import ReplayError, SlapoError
from slapo_core.internals import Codec, find_function
from slapo_graph.match import Match
from slapo_graph.patterns.definition import pattern_of
from slapo_graph.patterns.pattern import GraphPattern
from slapo_graph.primitives.find import load_pattern
from slapo_graph.primitives.selection import SelectedMatches

if TYPE_CHECKING:
    from slapo_core.plugins import Registry


class MatchCodec(Codec):
    """Save matches by path and number, and each of their patterns once."""

    name = "matches"

    def encode(self, value: Any, document: dict[str, Any], registry: Registry | None) -> Any | None:
        """Return matches as JSON; None if they were not located yet.

        Raises:
            SerializationError: a pattern has a value without a name.
        """
        matches = (value,) if isinstance(value, Match) else value
        if not isinstance(matches, tuple | list) or not all(isinstance(match, Match) for match in matches):
            return None
        patterns: list[Any] = document.setdefault("patterns", []) if registry is not None else []

        def number(pattern: GraphPattern) -> Any:
            data = _pattern_to_json(pattern, registry)
            if registry is None:
                return data
            if data not in patterns:
                patterns.append(data)
            return patterns.index(data)

        return [
            {"path": match.path, "pattern": number(match.pattern), "index": match.index, "total": match.total}
            for match in matches
        ]

    def decode(self, data: Any, document: Mapping[str, Any], registry: Registry | None, *, where: str) -> Any | None:
        """Return matches, which are located when the step is applied.

        Raises:
            ReplayError: one is malformed, or no plugin provides its pattern.
        """
        if isinstance(data, SelectedMatches | Match):
            return data
        if not isinstance(data, Sequence) or isinstance(data, str):
            raise ReplayError(f"{where} is not a list of matches (got {data!r})")
        found = []
        for each in data:
            numbers = (each.get("index"), each.get("total")) if isinstance(each, Mapping) else ()
            is_sound = len(numbers) == 2 and all(type(number) is int for number in numbers)
            if not is_sound or not isinstance(each.get("path"), str) or not 0 <= each["index"] < each["total"]:
                raise ReplayError(f"{where} holds a value that is not a match: {each!r}")
            pattern = _saved_pattern(each.get("pattern"), document, registry, where)
            found.append(Match(each["path"], pattern, each["index"], each["total"]))
        return SelectedMatches(found)


def _pattern_to_json(pattern: GraphPattern, registry: Registry | None) -> Any:
    """Return a pattern as JSON; by name if a plugin provides exactly this one.

    Raises:
        SerializationError: it holds a value without a name.
    """
    if registry is not None and pattern.name is not None and _of_plugin(pattern.name, registry) == pattern:
        distribution, version = registry.provider(registry.load(pattern.name, "patterns"))
        return {"name": pattern.name, "distribution": distribution, "version": version}
    return pattern.to_data()


def _saved_pattern(which: Any, document: Mapping[str, Any], registry: Registry | None, where: str) -> GraphPattern:
    """Read a pattern by its number in the document, or the pattern in place of the number."""
    if type(which) is int:
        saved = document.get("patterns", ())
        if not isinstance(saved, Sequence) or not 0 <= which < len(saved):
            raise ReplayError(f"{where} names pattern {which}, which the schedule does not hold")
        which = saved[which]
    if not isinstance(which, Mapping) or "name" not in which:
        return GraphPattern.from_data(which, lambda name: find_function(name, where=where))
    name = which["name"]
    found, reason, hint = None, "no plugin provides it", None
    try:
        found = _of_plugin(name, registry) if isinstance(name, str) else None
    except SlapoError as error:
        reason, hint = error.message, error.hint
    if found is None:
        saved_with = f"saved with {which.get('distribution')} {which.get('version')}"
        raise ReplayError(f"{where} is the pattern {name!r}, {saved_with}: {reason}", hint=hint)
    return found


def _of_plugin(name: str, registry: Registry | None) -> GraphPattern | None:
    """Return the pattern that a plugin provides under a name; None if there is none."""
    if registry is None or load_pattern(registry, name) is None:
        return None
    return pattern_of(name, lambda each: load_pattern(registry, each))
