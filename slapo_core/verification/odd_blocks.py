"""Repeated blocks of which one is scheduled in another way than the others: where a step may have been forgotten."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from slapo_core.spec.record import Record
from slapo_core.spec.suggestion import Change, Suggestion
from slapo_core.verification.failing import alike_path

__all__ = ["as_the_others"]

_MOST = 6

Steps = tuple[Record, ...]


def as_the_others(records: Sequence[Record], paths: Sequence[str]) -> list[Suggestion]:
    """For each module whose steps are not those of the modules at the same place in other blocks: these others' steps.

    Args:
        records: the whole schedule.
        paths: of all modules.

    Returns:
        what lies in the rarest variants first; empty where all blocks are alike, or none is like another.
    """
    steps: dict[str, list[Record]] = {}
    for record in records:
        steps.setdefault(record.path, []).append(record)
    places: dict[str, list[str]] = {}
    for path in paths:
        places.setdefault(alike_path(path), []).append(path)
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
    """What makes of the steps at a module those of another."""
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
