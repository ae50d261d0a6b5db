"""Find changes that make the schedule agree: suggestions, and equal blocks' steps."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slapo_core.internals import Internals
from slapo_core.primitive import Change, Record, Suggestion
from slapo_verify.search import Search, Steps, block_pattern

if TYPE_CHECKING:
    from slapo_core import Schedule


def suggestions(schedule: Schedule, gradients: Sequence[str]) -> list[Suggestion]:
    """Collect the suggestions of the plugins that a schedule names.

    Raises:
        HookError: a plugin's ``slapo_suggest`` raised, or gave something else than suggestions.
    """
    found = Internals(schedule).hooks.collect(
        "slapo_suggest",
        (Suggestion,),
        "yield slapo_core.Suggestion((slapo_core.Change(path, primitive),))",
        schedule=schedule,
        gradients=tuple(gradients),
    )
    return [suggestion for _, suggestion in found]


_MOST = 6


def as_the_others(records: Sequence[Record], paths: Sequence[str]) -> list[Suggestion]:
    """Suggest for a block's module the steps of the other blocks.

    Args:
        records: all steps of the schedule.
        paths: of all modules.

    Returns:
        the rarest variants first; empty where all blocks are equal, or all differ.
    """
    steps: dict[str, list[Record]] = {}
    for record in records:
        steps.setdefault(record.path, []).append(record)
    places: dict[str, list[str]] = {}
    for path in paths:
        places.setdefault(block_pattern(path), []).append(path)
    found: list[tuple[int, Suggestion]] = []
    for alike in places.values():
        if len(alike) < 2 or not any(path in steps for path in alike):
            continue
        variants = {path: tuple(steps.get(path, ())) for path in alike}
        counts = Counter(map(_texts, variants.values()))
        if len(counts) < 2 or len(counts) > 3:
            continue
        for path, own in variants.items():
            if counts[_texts(own)] == max(counts.values()) and len(set(counts.values())) > 1:
                continue
            for other in _unlike(own, variants.values()):
                changes = tuple(_changes(path, own, other))
                if changes:
                    found.append((counts[_texts(own)], Suggestion(changes, likely=True)))
    found.sort(key=lambda item: item[0])
    return [suggestion for _, suggestion in found][:_MOST]


def _texts(steps: Steps) -> tuple[str, ...]:
    return tuple(sorted(str(record.primitive) for record in steps))


def _unlike(own: Steps, variants: Iterable[Steps]) -> list[Steps]:
    unlike: dict[tuple[str, ...], Steps] = {}
    for other in variants:
        if _texts(other) != _texts(own):
            unlike.setdefault(_texts(other), other)
    return list(unlike.values())


def _changes(path: str, own: Steps, other: Steps) -> Iterator[Change]:
    """Yield the changes from one module's steps to another's."""
    wanted = Counter(_texts(other)) - Counter(_texts(own))
    surplus = Counter(_texts(own)) - Counter(_texts(other))
    added = [record for record in other if _take(wanted, record)]
    removed = [record for record in own if _take(surplus, record)]
    while removed and added and (pair := _pair(removed, added)):
        old, new = pair
        removed.remove(old)
        added.remove(new)
        yield Change(path, new.primitive, instead_of=old)
    for record in removed:
        yield Change(path, instead_of=record)
    for record in added:
        yield Change(path, record.primitive, first=record is other[0])


def _pair(removed: Sequence[Record], added: Sequence[Record]) -> tuple[Record, Record] | None:
    return next(((old, new) for old in removed for new in added if old.name == new.name), None)


def _take(counter: Counter[str], record: Record) -> bool:
    text = str(record.primitive)
    if not counter[text]:
        return False
    counter[text] -= 1
    return True


_LIKELY = 12  # trials, before the steps are narrowed down
_TOGETHER = 3  # at most this many steps are an answer

Suggest = Callable[[], Sequence[Suggestion]]


@dataclass(frozen=True)
class Fix:
    """Changes that make the schedule agree.

    Args:
        suggestion: the changes.
        likewise: paths at which the same is needed besides.
        of_part: whether only the searched part agrees with them, and the schedule has more mistakes.
    """

    suggestion: Suggestion
    likewise: tuple[str, ...] = ()
    of_part: bool = False


def change_pattern(change: Change) -> tuple[str, str, bool]:
    """Return a key that equal changes in repeated blocks share."""
    return block_pattern(change.path), str(change.primitive), change.instead_of is None


def applied(records: Sequence[Record], changes: Sequence[Change]) -> Steps:
    """Return the steps with the changes made."""
    found: list[Record] = []
    instead = {change.instead_of.index: change.primitive for change in changes if change.instead_of is not None}
    waiting = [change for change in changes if change.instead_of is None]
    for record in records:
        early = [change for change in waiting if change.first and change.path == record.path]
        waiting = [change for change in waiting if change not in early]
        found += map(_added, early)
        primitive = instead.get(record.index, record.primitive)
        if primitive is not None:
            found.append(dataclasses.replace(record, primitive=primitive))
    return (*found, *map(_added, waiting))


def _added(change: Change) -> Record:
    assert change.primitive is not None
    return Record(0, change.primitive, change.path, "", "")


def without_one(search: Search, part: Steps) -> Fix | None:
    """Find a step of ``part`` without which all others agree; several, if only together."""
    steps = part if len(search.steps) > 1 else ()
    changes = [Change(record.path, instead_of=record) for record in steps if search.agrees_without(record)]
    return Fix(Suggestion(tuple(changes))) if 0 < len(changes) <= _TOGETHER else None


def first_fix(search: Search, suggestions: Sequence[Suggestion]) -> Fix | None:
    """Try likely changes before the search; return the first that makes the schedule agree."""
    end, seen = search.trials + _LIKELY, set[object]()
    for suggestion in suggestions:
        key = tuple(map(change_pattern, suggestion.changes))
        for variant, likewise in _variants(search, suggestion) if suggestion.likely else ():
            if variant is not suggestion and key in seen:
                continue
            if search.trials < end and search.agrees(applied(search.steps, variant.changes)):
                return Fix(suggestion, likewise)
        seen.add(key)
    return None


def find_fix(search: Search, part: Steps, suggestions: Sequence[Suggestion]) -> Fix | None:
    """Find the first suggestion that makes the schedule agree, those near ``part`` first.

    Args:
        search: what tries.
        part: the steps that were found to fail.
        suggestions: what may be changed.
    """
    ordered = sorted(suggestions, key=lambda each: _distance(each, part))
    everywhere_first = bool(search.likewise)
    for suggestion in ordered:
        variants = _variants(search, suggestion)
        for variant, likewise in reversed(variants) if everywhere_first else variants:
            if search.agrees(applied(search.steps, variant.changes)):
                return Fix(suggestion, likewise)
    if len(part) == len(search.steps):
        return None
    for suggestion in ordered:
        if _is_within(suggestion, part) and search.agrees(applied(part, suggestion.changes)):
            return Fix(suggestion, of_part=True)
    return None


def _variants(search: Search, suggestion: Suggestion) -> list[tuple[Suggestion, tuple[str, ...]]]:
    """Extend a suggestion to all repeated blocks; with the paths of further changes."""
    changes = {(str(each), each.first): each for change in suggestion.changes for each in _alike(search, change)}
    if len(changes) <= len(suggestion.changes):
        return [(suggestion, ())]
    own = {change.path for change in suggestion.changes}
    others = dict.fromkeys(change.path for change in changes.values() if change.path not in own)
    return [(suggestion, ()), (Suggestion(tuple(changes.values())), tuple(others))]


def _alike(search: Search, change: Change) -> Iterator[Change]:
    if change.instead_of is not None:
        old, place = str(change.instead_of.primitive), block_pattern(change.path)
        for record in search.steps:
            if str(record.primitive) == old and block_pattern(record.path) == place:
                yield dataclasses.replace(change, path=record.path, instead_of=record)
        return
    has = {record.path for record in search.steps if str(record.primitive) == str(change.primitive)}
    for path in search.paths if "*" in block_pattern(change.path) else (change.path,):
        if block_pattern(path) == block_pattern(change.path) and path not in has:
            yield dataclasses.replace(change, path=path)


def _is_within(suggestion: Suggestion, part: Steps) -> bool:
    indices = {record.index for record in part}
    return all(change.instead_of is None or change.instead_of.index in indices for change in suggestion.changes)


def _distance(suggestion: Suggestion, part: Steps) -> int:
    """Return how many levels above the part's steps a change is."""
    return max(min(_up(record.path, change.path) for record in part) for change in suggestion.changes)


def _up(path: str, other: str) -> int:
    levels, others = path.split("."), other.split(".")
    common = 0
    while common < min(len(levels), len(others)) and levels[common] == others[common]:
        common += 1
    return len(levels) - common
