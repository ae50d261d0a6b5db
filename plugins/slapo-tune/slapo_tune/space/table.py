"""A space as a table of its symbols."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

from slapo_tune.space.space import COUNTED, Counts, Space

__all__ = ["Row", "describe", "table"]


@dataclass(frozen=True)
class Row:
    """One symbol.

    Args:
        name: of the symbol.
        candidates: all that it has anywhere, in the order in which they appear.
        depends: whether its candidates depend on earlier choices.
        points: of so many points it is a part.
    """

    name: str
    candidates: tuple[Any, ...]
    depends: bool
    points: int

    @property
    def shown(self) -> str:
        """The candidates, short: ``96 .. 192 (13)``."""
        numbers = all(type(value) in (int, float) for value in self.candidates)
        if numbers and len(self.candidates) > 4:
            return f"{min(self.candidates)} .. {max(self.candidates)} ({len(self.candidates)})"
        few = ", ".join(str(value) for value in self.candidates[:6])
        return few if len(self.candidates) <= 6 else f"{few}, ... ({len(self.candidates)})"


def table(space: Space, limit: int = COUNTED) -> list[Row]:
    """The symbols of a space, in the order in which they are chosen first.

    Args:
        space: what is described.
        limit: leaves that are looked at.
    """
    candidates: dict[str, dict[Any, Any]] = {}
    seen: dict[str, set[tuple[Any, ...]]] = {}
    points: dict[str, int] = {}

    for leaf in islice(space.leaves(), limit):
        for name, values in leaf.candidates.items():
            seen.setdefault(name, set()).add(values)
            candidates.setdefault(name, {}).update(dict.fromkeys(values))
            points[name] = points.get(name, 0) + (not leaf.reason)
    return [Row(name, tuple(candidates[name]), len(seen[name]) > 1, points[name]) for name in points]


def describe(space: Space, limit: int = COUNTED) -> str:
    """The table, and how many points there are, as text.

    Args:
        space: what is described.
        limit: leaves that are looked at.
    """
    counts, rows = space.counted(limit), table(space, limit)
    lines = [_size(counts)]
    width = max([6, *(len(row.name) for row in rows)])
    wide = max([10, *(len(row.shown) for row in rows)])
    if rows:
        lines.append(f"{'SYMBOL':<{width}}  {'CANDIDATES':<{wide}}  NOTES")
    for row in rows:
        notes = ["depends on earlier choices"] if row.depends else []
        if row.points != counts.points:
            notes.append(f"of {row.points} points only")
        lines.append(f"{row.name:<{width}}  {row.shown:<{wide}}  {'; '.join(notes)}".rstrip())
    for reason, number in sorted(counts.refused.items(), key=lambda item: -item[1]):
        lines.append(f"refused {number}: {reason}")
    return "\n".join(lines)


def _size(counts: Counts) -> str:
    refused = sum(counts.refused.values())
    if not counts.complete:
        return f"{counts.points} points and more, {refused} refused among the first {counts.points + refused}"
    return f"{counts.points} point{'s' * (counts.points != 1)}, {refused} refused"
