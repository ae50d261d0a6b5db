"""Patterns in a saved schedule: those of plugins by name, as primitives are, all others written out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slapo_core.errors import ReplayError, SlapoError
from slapo_core.schedule.finding import load_pattern
from slapo_core.schedule.functions import find_function

if TYPE_CHECKING:
    from slapo_core.graph.patterns.pattern import GraphPattern
    from slapo_core.plugins.registry import Registry

__all__ = ["SavedPatterns", "pattern_to_json"]


def pattern_to_json(pattern: GraphPattern, registry: Registry) -> Any:
    """As JSON holds it: ``{"name": "fusion.sdpa", ...}`` if it is just the one that a plugin provides now.

    Raises:
        SerializationError: it holds what cannot be named.
    """
    if pattern.name is not None and _of_plugin(pattern.name, registry) == pattern:
        distribution, version = registry.provider(registry.load(pattern.name, "patterns"))
        return {"name": pattern.name, "distribution": distribution, "version": version}
    return pattern.to_data()


class SavedPatterns:
    """The patterns of a document, each read when a match needs it, and once.

    Args:
        saved: as JSON holds them.
        registry: whose plugins provide those with a name; None knows none.
    """

    def __init__(self, saved: Any = (), registry: Registry | None = None) -> None:
        self._saved, self._registry = saved, registry
        self._read: dict[int, GraphPattern] = {}

    def get(self, which: Any, *, where: str) -> GraphPattern:
        """One of them by its number; or one that stands in its place.

        Raises:
            ReplayError: there is none, it is malformed, or no plugin provides it.
        """
        if type(which) is not int:
            return self._from_json(which, where)
        if which not in self._read:
            if not isinstance(self._saved, Sequence) or not 0 <= which < len(self._saved):
                raise ReplayError(f"{where} names pattern {which}, which the schedule does not hold")
            self._read[which] = self._from_json(self._saved[which], where)
        return self._read[which]

    def _from_json(self, value: Any, where: str) -> GraphPattern:
        from slapo_core.graph.patterns.pattern import GraphPattern

        if not isinstance(value, Mapping) or "name" not in value:
            return GraphPattern.from_data(value, lambda name: find_function(name, where=where))
        name = value["name"]
        found, reason, hint = None, "no plugin provides it", None
        try:
            found = _of_plugin(name, self._registry) if isinstance(name, str) else None
        except SlapoError as error:
            reason, hint = error.message, error.hint
        if found is None:
            saved_with = f"saved with {value.get('distribution')} {value.get('version')}"
            raise ReplayError(f"{where} is the pattern {name!r}, {saved_with}: {reason}", hint=hint)
        return found


def _of_plugin(name: str, registry: Registry | None) -> GraphPattern | None:
    """The pattern that a plugin provides by this name; None if there is none."""
    from slapo_core.graph.patterns.definition import pattern_of

    if registry is None or load_pattern(registry, name) is None:
        return None
    return pattern_of(name, lambda each: load_pattern(registry, each))
